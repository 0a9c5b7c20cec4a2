"""Compare a policy with float32: how far apart, where error is added, what must stay wide."""
