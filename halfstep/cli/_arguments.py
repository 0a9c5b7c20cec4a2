"""What options of several commands are."""

import argparse

from halfstep._policy import Policy


def share(text: str) -> float:
    """A share, from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"required a share from 0 to 1; got {text!r}")
    return value


def policy(text: str) -> Policy:
    """A policy from its text, or from a file that ends with `.toml`."""
    try:
        return Policy.load(text) if text.endswith(".toml") else Policy.parse(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text!r}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
