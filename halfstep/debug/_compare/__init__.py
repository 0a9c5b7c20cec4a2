"""A policy beside float32: how far apart, where error is added, what must stay in float32."""
