"""The versions of JAX that halfstep is tested with."""

TESTED_JAX = ("0.10.2", "0.11.2", "0.12.0.1")
"""The oldest, one in between, and the newest; the pins in `requirements/` are the same."""


def known_to_work() -> str:
    """Return the tested range in words, for messages."""
    return f"JAX {TESTED_JAX[0]} to {TESTED_JAX[-1]}"
