"""What a command answers: text for people, JSON for programs."""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Generator

from halfstep.cli._errors import CommandError
from halfstep.cli._files import check_writable


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json FILE`, which every command that answers has."""
    parser.add_argument("--json", metavar="FILE", help="write everything; - is standard output")


@contextlib.contextmanager
def kept_apart(arguments: argparse.Namespace) -> Generator[None]:
    """What the user's code prints in here does not get into JSON on standard output."""
    # Now, not after minutes of work.
    if arguments.json != "-":
        check_writable(arguments.json)
    with contextlib.redirect_stdout(sys.stderr if arguments.json == "-" else sys.stdout):
        yield


def answer(arguments: argparse.Namespace, text: str, json: str) -> None:
    """Print the text, and write the JSON if it is asked for; or print only JSON."""
    if arguments.json == "-":
        sys.stdout.write(f"{json}\n")
        return
    if text:
        sys.stdout.write(f"{text}\n")
    if arguments.json:
        write(arguments.json, f"{json}\n")


def write(name: str, text: str) -> None:
    """Write a file whose name was checked when there was time to do something about it."""
    try:
        pathlib.Path(name).write_text(text)
    except OSError as error:
        raise CommandError(
            f"cannot write {name!r}: {error.strerror}. Give another file, or - for the screen."
        ) from error
