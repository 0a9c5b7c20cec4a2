"""Options of benchmarks to make single rows, and to keep the others of a report."""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any


def add_choice(options: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add `--only` and `--resume`."""
    options.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="only these rows")
    add_resume(options)


def add_resume(options: argparse.ArgumentParser) -> None:
    """Add `--resume`."""
    options.add_argument(
        "--resume", action="store_true", help="keep the other rows of the file of --json"
    )


def earlier_report(
    options: argparse.ArgumentParser, given: argparse.Namespace
) -> dict[str, Any] | None:
    """The report whose rows `--resume` keeps."""
    if not given.resume:
        return None
    if given.json in (None, "-"):
        options.error("--resume keeps the rows of a file: give it with --json FILE.")
    return json.loads(pathlib.Path(given.json).read_text())


def earlier_runs(
    options: argparse.ArgumentParser, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """The training runs that `--resume` keeps, each with the JAX that it was made with."""
    made = earlier_report(options, given)
    if made is None:
        return []
    return [{"jax": made["versions"]["jax"], **run} for run in made["runs"]]
