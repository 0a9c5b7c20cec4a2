"""Run `halfstep preflight`."""

import argparse
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from halfstep._base import wrapped
from halfstep._explain import LintError
from halfstep._preflight import (
    DoesNotFitError,
    PreflightEntry,
    PreflightError,
    PreflightReport,
    preflight,
)
from halfstep.cli._command import CommandError, answer, check_writable, kept_apart
from halfstep.cli._load import checked_pair, load

PLOTS = (".png", ".pdf", ".svg")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    check_writable(arguments.plot, endings=PLOTS)
    check_writable(arguments.plot_peak, endings=PLOTS)
    entries = _entries(arguments)
    report = PreflightReport(tuple(entry for entry in entries if entry is not None))
    _show(report, arguments)
    misses = any(entry is None for entry in entries)
    if arguments.f8 is not None:
        misses |= _fails(report.check, f8=arguments.f8)
    if arguments.require_fit:
        misses |= _fails(report.require_fit)
    return 1 if misses else 0


def _fails(check: Callable[..., None], **options: float) -> bool:
    """Return whether a check of a report raises, and print its message."""
    try:
        check(**options)
    except (LintError, DoesNotFitError) as error:
        sys.stderr.write(f"{error}\n")
        return True
    return False


def _entries(arguments: argparse.Namespace) -> list[PreflightEntry | None]:
    """Return the entries that are compiled or saved; `None` where no batch fits."""
    if arguments.make_step.endswith(".json"):
        asked = ("target", "policy", "batch", "largest_batch")
        given = [f"--{name.replace('_', '-')}" for name in asked if getattr(arguments, name)]
        if given:
            raise CommandError(
                f"{arguments.make_step} is a saved report, and nothing is compiled; leave out "
                f"{', '.join(given)}."
            )
        with kept_apart(arguments):
            return list(_saved(arguments.make_step).entries)
    if not arguments.target:
        raise CommandError(
            f"to compile {arguments.make_step}, --target is required and was not given. Write "
            "--target h100, say."
        )
    if arguments.largest_batch and arguments.batch:
        raise CommandError(
            "--largest-batch looks for the batch itself; got --batch "
            f"{','.join(map(str, arguments.batch))} with it. Leave one of them out."
        )
    with kept_apart(arguments):
        has_batch = arguments.batch or arguments.largest_batch
        named = (("policy", arguments.policy), ("batch", has_batch))
        make = checked_maker(arguments, [option for option, is_given in named if is_given])
        try:
            return list((_search if arguments.largest_batch else _sweep)(make, arguments))
        except PreflightError as error:
            raise CommandError(f"{error}") from error


def _saved(name: str) -> PreflightReport:
    try:
        return PreflightReport.load(name)
    except PreflightError as error:
        raise CommandError(f"{error}") from error


def _sweep(make: Callable[..., Any], arguments: argparse.Namespace) -> Iterator[PreflightEntry]:
    policies = [{"policy": policy} for policy in arguments.policy] or [{}]
    batches = [{"batch": batch} for batch in arguments.batch] or [{}]
    variants = {}
    for policy, batch in itertools.product(policies, batches):
        parts = [*policy.values(), *(f"batch {value}" for value in batch.values())]
        variants[", ".join(parts) or "step"] = make(**policy, **batch)
    yield from preflight(
        None, targets=arguments.target, variants=variants, **compile_settings(arguments)
    ).entries


def _search(
    make: Callable[..., Any], arguments: argparse.Namespace
) -> Iterator[PreflightEntry | None]:
    """Yield the entry of the largest batch for each target and policy; `None` if no batch fits."""
    for target, policy in itertools.product(arguments.target, arguments.policy or [None]):
        given = {} if policy is None else {"policy": policy}
        label = "" if policy is None else f"{policy}, "
        try:
            found = preflight.largest_batch(
                lambda batch, given=given: make(**given, batch=batch),
                target=target,
                multiple_of=arguments.multiple_of,
                **compile_settings(arguments),
            )
        except DoesNotFitError as error:
            sys.stderr.write(f"{label}{error}\n")
            yield None
        else:
            compiles = len(found.tried)
            _say(f"{label}{target.name}: the largest batch is {found.batch} ({compiles} compiles)")
            yield found.named(f"{label}batch {found.batch}")


def compile_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "donate_argnums": arguments.donate,
        "memory_fraction": arguments.memory_fraction,
        "gemm": arguments.gemm,
        "flags": arguments.flag,
        "timeout": arguments.timeout,
        "cache": not arguments.no_cache,
        # In the log of a CI run, a progress bar is not overwritten and would be noise.
        "progress": sys.stderr.isatty(),
    }


def _show(report: PreflightReport, arguments: argparse.Namespace) -> None:
    text = ""
    if report.entries:
        text = report.detail() if arguments.detail else str(report)
        # The details already contain the peak.
        if arguments.peak and not arguments.detail:
            text += f"\n\n{report.peak}"
    answer(arguments, text, json.dumps(report.to_dict(), indent=2))
    try:
        if arguments.plot and report.entries:
            report.plot(arguments.plot)
        if arguments.plot_peak and report.entries:
            report.peak.plot(arguments.plot_peak)
    except (OSError, ModuleNotFoundError) as error:
        raise CommandError(f"{error}") from error


def checked_maker(
    arguments: argparse.Namespace, options: Collection[str]
) -> Callable[..., tuple[Callable[..., Any], tuple[Any, ...] | list[Any]]]:
    """Return the user's function, with checks of what it takes and returns.

    Args:
        arguments: The arguments of the command; `make_step` names the function.
        options: The names of the arguments that the function will be called with.
    """
    name, make = arguments.make_step, load(arguments.make_step)
    try:
        inspect.signature(make).bind(**dict.fromkeys(options))
    except TypeError as error:
        called = ", ".join(f"{option}=..." for option in options)
        raise CommandError(
            f"{name} must be a function that can be called as {name.rpartition(':')[2]}({called}); "
            f"its signature is {inspect.signature(make)}: {error}. Let it take policy= for each "
            "--policy, batch= for each --batch, and nothing else."
        ) from error

    def checked(**settings: Any) -> tuple[Callable[..., Any], tuple[Any, ...] | list[Any]]:
        return checked_pair(name, make(**settings), "step")

    return checked


def _say(text: str) -> None:
    sys.stdout.write(f"{wrapped(text)}\n")
