"""Recompute for the backward pass: islands of float32, and segments between stores."""
