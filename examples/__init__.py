"""Runnable examples: `python -m examples.NAME` from the root of the repository."""
