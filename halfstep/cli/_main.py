"""Run the command: one subcommand per question."""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence

from halfstep._version import __version__
from halfstep.cli import (
    _bisect,
    _doctor,
    _explain,
    _formats,
    _plan,
    _preflight,
    _replay,
)
from halfstep.cli._command import CommandError

_EPILOG = """\
examples:
  Is this installation in order, and what else could be installed?
    halfstep doctor

  Which operations of a loss run in 16 bits, and why are the others not?
    halfstep explain train.py:make_loss --policy bf16

  Does a training step fit on hardware that is not there?
    halfstep preflight train.py:make_step --target h100 --policy f32,bf16

  How is it made to fit into the memory that there is?
    halfstep plan train.py:make_step --target rtx4090 --out plan.toml

  MAKE_LOSS and MAKE_STEP are functions of yours that return a function and its
  arguments. "halfstep COMMAND --help" shows how they look.

exit status, for scripts and CI:
  0  yes: all is as it should be
  1  no: there is an answer, and it is in the output
  2  no answer: something was mistyped, is missing, or went wrong

Every command that answers has --json FILE; --json - prints JSON and nothing
else.
"""

_NEGATIVE = re.compile(r"-\.?\d[\d.eE+/-]*")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Prints each command on one line."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=20)
        # The length that argparse computes is too short for commands, which it indents.
        self._action_max_length = 16


def parser() -> argparse.ArgumentParser:
    """Make the parser of the whole command."""
    made = argparse.ArgumentParser(
        prog="halfstep",
        description="Mixed-precision training for JAX, from the command line.",
        epilog=_EPILOG,
        formatter_class=_Formatter,
    )
    made.add_argument("--version", action="version", version=f"halfstep {__version__}")
    commands = made.add_subparsers(required=True, metavar="COMMAND", title="commands")
    for module in (_explain, _bisect, _replay, _preflight, _plan, _formats, _doctor):
        module.add(commands)
    return made


def parsed(words: list[str]) -> argparse.Namespace:
    """Parse the words of a command line."""
    made = parser()
    # argparse has no public way to list what was added.
    commands = next(one.choices for one in made._actions if isinstance(one.choices, Mapping))
    if words and not words[0].startswith("-") and words[0] not in commands:
        # Imported here, as below: only mistakes need it.
        import difflib

        near = difflib.get_close_matches(words[0], commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(commands)}"
        made.error(f"unknown command {words[0]!r}: {hint}")
    # argparse takes -1e-8 for an option, and a word with a space never.
    return made.parse_args([f" {word}" if _NEGATIVE.fullmatch(word) else word for word in words])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 0 yes, 1 no, 2 no answer."""
    arguments = parsed(sys.argv[1:] if argv is None else list(argv))
    if arguments.uses_jax:
        _start_jax(on_cpu=not getattr(arguments, "devices", False))
    try:
        return arguments.run(arguments)
    except CommandError as error:
        sys.stderr.write(f"halfstep: {error}\n")
        return 2
    # 130 is what shells report for a command that Ctrl-C ended (128 + SIGINT).
    except KeyboardInterrupt:
        sys.stderr.write("halfstep: interrupted\n")
        return 130
    except Exception:
        import traceback

        # The error is in the user's code, where a traceback says most. Python's own exit status for
        # an error, 1, would mean "no".
        traceback.print_exc()
        sys.stderr.write("halfstep: no answer, because of the error above\n")
        return 2


def _start_jax(*, on_cpu: bool) -> None:
    # Imported here, because it takes seconds, and help and some commands do without.
    import jax

    if on_cpu and "JAX_PLATFORMS" not in os.environ:
        # Commands need no accelerator. On the CPU, they take none from a run that uses it.
        jax.config.update("jax_platforms", "cpu")
