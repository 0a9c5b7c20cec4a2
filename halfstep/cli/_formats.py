"""Implement `halfstep formats`: show the number formats, and how each stores a number."""

import argparse

from halfstep.cli._command import Commands, add_command, add_json

_DESCRIPTION = """\
Print the number formats: how many bits, the largest and the smallest number,
and the distance from 1 to the next one (eps). A policy names the first ones;
those of 8 and 4 bits belong to recipes such as f8, which keep a scale next to
each array.

With numbers, print how each format stores them: rounded to the nearest, as the
hardware does, without a scale.

The exit status is 0.
"""


def add(commands: Commands) -> None:
    """Add the subcommand to the command."""
    parser = add_command(
        commands,
        "formats",
        run,
        help="which number formats are there, and what do they store?",
        description=_DESCRIPTION,
        example="halfstep formats\nhalfstep formats 0.1 70000\nhalfstep formats -1e-8",
        uses_jax=False,
    )
    parser.add_argument(
        "numbers", metavar="NUMBER", nargs="*", type=_number, help="such as 0.1, 1e-8 or 1/3"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from halfstep.cli._run import formats

    return formats.run(arguments)


def _number(text: str) -> tuple[str, object]:
    """Return the text of a number, and the number."""
    from halfstep.cli._run.formats import number

    text = text.strip()
    try:
        return text, number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error
