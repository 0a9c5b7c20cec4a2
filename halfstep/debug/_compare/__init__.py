"""Compare a policy with float32: how large errors are, where they arise, what must stay wide."""
