"""Random programs under `autocast`, compared with what they compute in float64."""
