"""Implement `halfstep doctor`: check that this installation is in order."""

import argparse

from halfstep.cli._command import Commands, add_command, add_json

_DESCRIPTION = """\
Say what is installed, which versions halfstep was tested with, what each extra
of halfstep would add and how to get it, and which known pitfalls of JAX there
are on this machine, each with its cause and its cure.

No device is touched, so that nothing is taken from a run that uses it. With
--devices JAX is started, and what it finds is listed.

The exit status is 0, 1 if something is wrong (notes are not wrong), and 2 if
there is no answer.
"""


def add(commands: Commands) -> None:
    """Add the subcommand to the command."""
    parser = add_command(
        commands,
        "doctor",
        run,
        help="is this installation in order, and what could be added?",
        description=_DESCRIPTION,
        example="halfstep doctor\nhalfstep doctor --devices --json -",
    )
    parser.add_argument(
        "--devices", action="store_true", help="start JAX and list its devices; takes them"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    from halfstep.cli._run import doctor

    return doctor.run(arguments)
