"""What options of several commands are."""

import argparse


def share(text: str) -> float:
    """A share, from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"required a share from 0 to 1; got {text!r}")
    return value
