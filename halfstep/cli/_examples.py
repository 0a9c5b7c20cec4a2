"""Implement `halfstep examples`: list training scripts, and write one as a single file."""

import argparse

from halfstep.cli._command import Commands, add_command, add_json

_DESCRIPTION = """\
List the examples: whole training scripts in mixed precision, for Equinox, Flax,
Haiku and plain JAX. With a name, print that example as one file that runs by
itself; with --out, write it into a folder, and say what it needs.

The exit status is 0, and 2 for an unknown example or one that cannot be
written.
"""


def add(commands: Commands) -> None:
    """Add the subcommand."""
    parser = add_command(
        commands,
        "examples",
        run,
        help="what does a whole training script look like?",
        description=_DESCRIPTION,
        example="halfstep examples\nhalfstep examples plain_jax --out .",
        uses_jax=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", help="an example; without it, a list")
    parser.add_argument("--out", metavar="DIR", help="write NAME.py into this folder")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from halfstep.cli._run import examples

    return examples.run(arguments)
