"""Run `halfstep plan`."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from halfstep._policy import as_policy
from halfstep._preflight import DoesNotFitError, MemoryPlan, PreflightError, plan
from halfstep.cli._command import CommandError, answer, check_writable, kept_apart
from halfstep.cli._load import load
from halfstep.cli._run.preflight import PLOTS, checked_maker, compile_settings


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    check_writable(arguments.plot, endings=PLOTS)
    check_writable(arguments.out, endings=(".toml",))
    try:
        with kept_apart(arguments):
            found = _plan(arguments)
    except DoesNotFitError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except (PreflightError, ValueError) as error:
        raise CommandError(f"{error}") from error
    answer(arguments, str(found), json.dumps(found.to_dict(), indent=2))
    try:
        if arguments.out:
            found.save(arguments.out)
        if arguments.plot:
            found.plot(arguments.plot)
    except (OSError, ModuleNotFoundError) as error:
        raise CommandError(f"{error}") from error
    return 0


def _plan(arguments: argparse.Namespace) -> MemoryPlan:
    make, policy = checked_maker(arguments, ["policy"]), as_policy(arguments.policy)
    batches: Sequence[Any] | None = None
    if arguments.batches:
        batches = list(load(arguments.batches)())
    # The policy is passed as a string, as in every other command.
    _, args = make(policy=str(policy))
    return plan(
        lambda chosen: make(policy=str(chosen))[0],
        args,
        target=arguments.target,
        budget=arguments.budget,
        policy=policy,
        max_gradient_error=arguments.max_gradient_error,
        batches=batches,
        compiles=arguments.compiles,
        **compile_settings(arguments),
    )
