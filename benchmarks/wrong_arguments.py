"""Wrong objects for every public parameter: which library answers, and does it name the parameter?

    python -m benchmarks.wrong_arguments --json FILE

The examples of all docstrings are run, and every call of a public function or method in them is
repeated with one argument replaced by something else: 52 objects, from `None` to a huge number. The
call must work, or halfstep itself must refuse it with an error that names the parameter. An error
from inside another library, an accident and an error that names something else are listed. The exit
status is 1 if there is one. The compilers of `preflight` and `plan` are replaced by a function that
accepts everything. Needs `halfstep[flax,orbax]`.
"""

import collections
import contextlib
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tqdm import tqdm

from benchmarks._hardening import wrong_arguments_text as text
from benchmarks._report import parser, report, write
from tests import _wrong_arguments as wrong

MODULE = "benchmarks.wrong_arguments"
LEAST = 10_000
"""Calls that there must be."""


def measure(objects: Sequence[str], left_out: Sequence[str]) -> dict[str, Any]:
    """Call everything with everything.

    Args:
        objects: Names of the objects that are handed in.
        left_out: Parts of names of functions that are not called.
    """
    answers: collections.Counter[str] = collections.Counter()
    complaints = []
    with _elsewhere() as folder:
        calls = wrong.harvested(folder, left_out)
        for call, found in tqdm(wrong.asked(calls, objects), unit="function", total=len(calls)):
            answers[call.name.partition(".")[0]] += len(found)
            complaints += [text for text in found if text]
    return {
        "functions": len(calls),
        "parameters": sum(len(call.parameters) for call in calls),
        "objects": len(objects),
        "calls": dict(answers),
        "complaints": complaints,
    }


@contextlib.contextmanager
def _elsewhere() -> Iterator[pathlib.Path]:
    """A folder for what examples write, and no warnings of what they are given."""
    before = pathlib.Path.cwd()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.chdir(folder)
        try:
            yield pathlib.Path(folder)
        finally:
            os.chdir(before)


def bars(result: Mapping[str, Any], least: int) -> dict[str, bool]:
    """What must hold."""
    return {
        f"{least:,} calls": sum(result["calls"].values()) >= least,
        "every answer is halfstep's own and names the parameter": not result["complaints"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="five objects, fast functions")
    given = options.parse_args(argv)
    objects = wrong.FEW if given.quick else tuple(wrong.WRONG)
    result = measure(objects, (*wrong.LEFT_OUT, *(wrong.SLOW if given.quick else ())))
    result["bars"] = bars(result, 1_000 if given.quick else LEAST)
    print(text(result))
    for complaint in result["complaints"]:
        print(complaint, file=sys.stderr)
    made = report(MODULE, result, packages=("flax", "orbax-checkpoint"))
    write(made, given.json)
    return 0 if all(result["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
