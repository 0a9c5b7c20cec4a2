"""Options of training benchmarks to train single rows, and to keep the others of a report."""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any


def add_choice(options: argparse.ArgumentParser, names: Sequence[str]) -> None:
    """Add `--only` and `--resume`."""
    options.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="only these rows")
    options.add_argument(
        "--resume", action="store_true", help="keep the other rows of the file of --json"
    )


def earlier_runs(
    options: argparse.ArgumentParser, given: argparse.Namespace
) -> list[dict[str, Any]]:
    """The runs that `--resume` keeps, each with the JAX that it was made with."""
    if not given.resume:
        return []
    if given.json in (None, "-"):
        options.error("--resume keeps the rows of a file: give it with --json FILE.")
    made = json.loads(pathlib.Path(given.json).read_text())
    return [{"jax": made["versions"]["jax"], **run} for run in made["runs"]]
