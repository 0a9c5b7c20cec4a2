"""Provide what all commands share: how to add a command, options, answers, and errors."""

import argparse
import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Generator
from typing import Any, Protocol, runtime_checkable

from halfstep._text import wrapped


class CommandError(Exception):
    """Something the user gave cannot be used; the message says what and what to type."""


# Commands and their options.

LOSS = """\
MAKE_LOSS names a function that returns a loss and its arguments (arrays or
jax.ShapeDtypeStructs). The first argument holds the parameters:

    def make_loss():
        ...
        return loss, (params, batch)
"""


@runtime_checkable
class Commands(Protocol):
    """The object that `argparse` returns for subcommands, whose own type is private."""

    def add_parser(self, name: str, **options: Any) -> argparse.ArgumentParser:
        """Add a subcommand."""
        ...


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    example: str,
    uses_jax: bool = True,
) -> argparse.ArgumentParser:
    """Add a subcommand with its line in the list, its description and an example.

    Args:
        commands: Where to add it.
        name: Its name.
        run: What it does; returns the exit status. It imports what needs JAX.
        help: Its line in the list.
        description: What it does, in sentences.
        example: Command lines.
        uses_jax: Whether it imports JAX, which is then told to use the CPU.
    """
    lines = "".join(f"  {line}\n" for line in example.splitlines())
    parser = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"example:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, uses_jax=uses_jax)
    return parser


def add_maker(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the argument that names the user's function: `make_loss` or `make_step`."""
    parser.add_argument(name, metavar=name.upper(), help="module:function or file.py:function")


def share(text: str) -> float:
    """Parse a share, from 0 to 1."""
    try:
        value = float(text)
    except ValueError:
        # This value is out of range, so that text, NaN and numbers beyond the range get the same
        # message.
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"required a share from 0 to 1; got {text!r}")
    return value


def policy(text: str) -> object:
    """Read a policy from its text, or from a file that ends with `.toml`."""
    # Imported here, because it imports JAX, and help needs no policy.
    from halfstep._policy import Policy

    try:
        return Policy.load(text) if text.endswith(".toml") else Policy.parse(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot read {text!r}: {error.strerror}. Give a file that Policy.save has written"
        ) from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error


# Answers: text for people, JSON for programs.


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json FILE`, which every command that answers has."""
    parser.add_argument("--json", metavar="FILE", help="write everything; - is standard output")


@contextlib.contextmanager
def kept_apart(arguments: argparse.Namespace) -> Generator[None]:
    """Keep the output of the user's code out of JSON on standard output."""
    # Check the file now, not after minutes of work.
    if arguments.json != "-":
        check_writable(arguments.json)
    with contextlib.redirect_stdout(sys.stderr if arguments.json == "-" else sys.stdout):
        yield


def answer(arguments: argparse.Namespace, text: str, json: str) -> None:
    """Print the text, and write the JSON if it is requested; or print only JSON."""
    if arguments.json == "-":
        sys.stdout.write(f"{json}\n")
        return
    if text:
        sys.stdout.write(f"{wrapped(text)}\n")
    if arguments.json:
        write(arguments.json, f"{json}\n")


def write(name: str, text: str) -> None:
    """Write a file whose name was checked earlier, by `check_writable`."""
    try:
        pathlib.Path(name).write_text(text)
    except OSError as error:
        raise CommandError(
            f"cannot write {name!r}: {error.strerror}. Give another file, or - for the screen."
        ) from error


def check_writable(name: str | None, *, endings: tuple[str, ...] = ()) -> None:
    """Refuse a file that cannot be written, or whose name has another ending."""
    if name is None:
        return
    path = pathlib.Path(name)
    if endings and path.suffix.lower() not in endings:
        raise CommandError(
            f"cannot write {name!r}: the name must end in {' or '.join(endings)}. "
            "Give another name."
        )
    if not path.parent.is_dir():
        raise CommandError(
            f"cannot write {name!r}: there is no folder {str(path.parent)!r}. Make it first."
        )
    # Ask for access and do not try: opening the file would empty it, and the command may fail
    # later.
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it is a folder" if path.is_dir() else "permission denied"
        raise CommandError(f"cannot write {name!r}: {why}. Give another name.")
