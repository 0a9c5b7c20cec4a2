"""One command, one subcommand a question."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

import jax

from halfstep._version import __version__
from halfstep.cli import _bisect, _lint, _preflight, _replay
from halfstep.cli._errors import CommandError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0 yes, 1 no, 2 no answer."""
    parser = argparse.ArgumentParser(
        prog="halfstep", description="Mixed-precision training for JAX, from the command line."
    )
    parser.add_argument("--version", action="version", version=f"halfstep {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _lint.add(commands)
    _preflight.add(commands)
    _replay.add(commands)
    _bisect.add(commands)
    arguments = parser.parse_args(argv)
    if "JAX_PLATFORMS" not in os.environ:
        # Nothing is computed here: no accelerator is taken from those who use it, or missed.
        jax.config.update("jax_platforms", "cpu")
    try:
        return arguments.run(arguments)
    except CommandError as error:
        sys.stderr.write(f"halfstep: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("halfstep: interrupted\n")
        return 130
    except Exception:
        # In the user's code, where a traceback says most. Python's own status for it, 1, is "no".
        traceback.print_exc()
        sys.stderr.write("halfstep: no answer, because of the error above\n")
        return 2
