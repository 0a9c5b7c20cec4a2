"""Run `halfstep bisect`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from halfstep.cli._command import CommandError, answer, check_writable, kept_apart
from halfstep.cli._load import load_loss
from halfstep.debug import bisect


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    if arguments.output:
        check_writable(arguments.output)
    with kept_apart(arguments):
        loss, given = load_loss(arguments.make_loss)
        try:
            found = bisect(
                loss,
                _batches(arguments.make_loss, given),
                arguments.policy,
                tolerance=arguments.tolerance,
                refine=not arguments.scopes,
                progress=sys.stderr.isatty(),
            )
        except ValueError as error:
            raise CommandError(f"{error}") from error
    if arguments.output:
        found.save(arguments.output)
    answer(arguments, str(found), found.to_json())
    return 1 if found.needed else 0


def _batches(name: str, given: Sequence[Any]) -> Sequence[Sequence[Any]]:
    # A tuple is the arguments of one batch, a list is several batches.
    if isinstance(given, tuple):
        return [given]
    if not given or not all(isinstance(batch, tuple) for batch in given):
        got = ", ".join(dict.fromkeys(type(batch).__name__ for batch in given)) or "nothing"
        raise CommandError(
            f"{name} must return a loss and a list of tuples of its arguments, one for each batch, "
            f"such as [(params, batch), ...]; got a list of {got}."
        )
    return given
