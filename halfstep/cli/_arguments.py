"""What commands and options of several commands are."""

import argparse
from collections.abc import Callable
from typing import Any

from halfstep._policy import Policy

LOSS = """\
MAKE_LOSS names a function that returns a loss and its arguments (arrays or
jax.ShapeDtypeStructs), of which the first holds the parameters:

    def make_loss():
        ...
        return loss, (params, batch)
"""


def add_command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    example: str,
) -> argparse.ArgumentParser:
    """Add a subcommand: the line in the list, what it does, and something to type."""
    lines = "".join(f"  {line}\n" for line in example.splitlines())
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"example:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_maker(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the argument that names the user's function: `make_loss` or `make_step`."""
    parser.add_argument(name, metavar=name.upper(), help="module:function or file.py:function")


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
        raise argparse.ArgumentTypeError(
            f"cannot read {text!r}: {error.strerror}. Give a file that Policy.save has written"
        ) from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
