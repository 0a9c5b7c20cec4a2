"""Is the state of loops as exact as by hand? Every row, in every spelling of its loop.

    python -m benchmarks.loop_state --json benchmarks/results/loop_state.json
    python -m benchmarks.loop_state --row average --spelling scan --policy bf16

Each row is evaluated in float64, cast by hand and through `autocast`. The errors of `autocast` in
the final state, the stacked outputs and the derivatives may be 4 times those by hand, or one
rounding. The table has the error that is the largest part of its bound, and the JSON has all. Rows
without a loop are measured and have no bound. The exit status is 1 if a row is wrong.
"""

import functools
import multiprocessing
import os
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from benchmarks._report import add_sources, parser, read_or_make, report, table, write

MODULE = "benchmarks.loop_state"
_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_allow_excess_precision=false"
)
_QUICK = ("average, literal, 256", "sum, two terms", "fold")


def _judged(row: str, spellings: Sequence[str], policies: Sequence[str]) -> list[dict[str, Any]]:
    """All spellings of a row, in this process."""
    from tests.loops._judge import judge

    made: list[dict[str, Any]] = []
    for spelling in spellings:
        for policy in policies:
            case: dict[str, Any] = {"row": row, "spelling": spelling, "policy": policy}
            try:
                found = judge(row, spelling, policy)
            except Exception as error:  # It ends its own case, not the run.
                text = f"{type(error).__name__}: {error}"[:300]
                made.append({**case, "worst": None, "verdict": "FAILED", "text": text})
                continue
            errors = {
                what: {
                    "ours": _shortly(error),
                    "by_hand": _shortly(found.by_hand[what]),
                    "bound": _shortly(found.bound(what)),
                }
                for what, error in found.errors.items()
            }
            made.append({**case, "worst": found.worst, "verdict": found.text, "errors": errors})
    return made


def _shortly(error: float) -> float:
    """Round an error to the digits that mean anything; there are thousands."""
    return float(f"{error:.3g}")


def _worked(policies: Sequence[str], job: tuple[str, Sequence[str]]) -> tuple[str, Any]:
    row, spellings = job
    return row, _judged(row, spellings, policies)


def measure(
    chosen: Mapping[str, Sequence[str]], policies: Sequence[str], processes: int
) -> dict[str, Any]:
    """Judge the chosen rows, each with its spellings."""
    # Not `fork`: JAX's threads do not survive it.
    context = multiprocessing.get_context("spawn")
    rows: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder, unittest.mock.patch.dict(os.environ):
        os.environ.update(
            JAX_PLATFORMS="cpu",
            XLA_FLAGS=_FLAGS,
            JAX_COMPILATION_CACHE_DIR=folder,
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        # Not an executor of `concurrent.futures`: with new processes now and then, it can hang.
        with context.Pool(processes, maxtasksperchild=8) as pool:
            done = pool.imap_unordered(functools.partial(_worked, policies), chosen.items())
            for row, cases in tqdm(done, total=len(chosen), unit="row", disable=None):
                rows[row] = cases
    made = [case for row in chosen for case in rows[row]]
    return {"cases": made, "bars": bars(made)}


def bars(cases: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Return the conditions that must hold."""
    return {
        "no state is wrong": all(case["verdict"] in ("exact", "measured") for case in cases),
        # A bound of everything would be kept by zeros.
        "every bound is less than 1": all(
            error["bound"] < 1
            for case in cases
            if case["verdict"] != "measured"
            for error in case.get("errors", {}).values()
        ),
    }


def lines(cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table."""
    for case in cases:
        line = {name: case[name] for name in ("row", "spelling", "policy")}
        worst = case["worst"]
        if worst is None:
            yield {**line, "verdict": f"FAILED: {case['text'][:60]}"}
            continue
        found = case["errors"][worst]
        shown = {name: f"{error:.1e}" for name, error in found.items()}
        if case["verdict"] == "measured":
            del shown["bound"]
        yield {**line, "worst": worst, **shown, "verdict": case["verdict"]}


def text(result: Mapping[str, Any]) -> str:
    """Return the table, and how many cases there are of each verdict."""
    cases = result["cases"]
    judged = [case for case in cases if case["verdict"] != "measured"]
    exact = sum(case["verdict"] == "exact" for case in judged)
    columns = {"row": "row", "spelling": "spelling", "policy": "dtype", "worst": "error of"}
    columns |= {"ours": "halfstep", "by_hand": "by hand", "bound": "bound", "verdict": "verdict"}
    return (
        f"{table(list(lines(cases)), columns)}\n\n{exact} of {len(judged)} cases with a loop are "
        f"exact, and {len(cases) - len(judged)} without one are measured."
    )


WRITTEN: Mapping[str, str] = MappingProxyType(
    {
        "fold": "a Python loop over 64 terms",
        "halving": "2,048 terms, added in pairs, and the sums in pairs again",
        "assoc": "`lax.associative_scan` of 2,048 steps with a decay of 0.999",
        "associative_scan by hand": "the same by slices and sums",
        "reduce": "`jnp.sum`, `lax.reduce`",
    }
)
"""What the rows without a loop are, for readers of the page."""


def page(result: Mapping[str, Any]) -> str:
    """Return the part of the page on autocast: how many loops are exact, and what is not a loop."""
    cases = result["cases"]
    rows: dict[str, dict[str, str]] = {}
    for case in cases:
        if case["verdict"] != "measured":
            continue
        found = case["errors"][case["worst"]]
        row = rows.setdefault(case["row"], {"written": WRITTEN[case["row"]]})
        row[case["policy"]] = f"{found['ours']:.1e} ({found['by_hand']:.1e})"
    judged = [case for case in cases if case["verdict"] != "measured"]
    exact = sum(case["verdict"] == "exact" for case in judged)
    loops, spellings = (len({case[key] for case in judged}) for key in ("row", "spelling"))
    columns = {"written": "written as", "bf16": "bf16 (sums in float32 by hand)", "f16": "f16"}
    return (
        f"{table(list(rows.values()), columns)}\n\nThe relative errors against float64. Of "
        f"{loops} loops (running averages, recurrent and state space models, attention in blocks, "
        f"filters, solvers) in up to {spellings} spellings (`scan`, `fori_loop`, `while_loop`, "
        f"recomputed, mapped and nested), in bf16 and f16, {exact:,} of {len(judged):,} are exact: "
        "no error of a state, of stacked outputs or of a gradient is more than 4 times that by "
        "hand, or than one rounding."
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    add_sources(options, quick="three rows, two spellings")
    options.add_argument("--row", metavar="TEXT", help="only rows whose name has this in it")
    options.add_argument("--spelling", action="append", metavar="NAME", help="only this spelling")
    options.add_argument("--policy", action="append", choices=("bf16", "f16"), help="only this one")
    options.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    given = options.parse_args(argv)

    def make() -> dict[str, Any]:
        # Not before: it imports JAX, which `--help` and `--from` do not need.
        from tests.loops._rows import CASES, WITHOUT

        spellings = given.spelling or (["scan", "while_loop"] if given.quick else None)
        chosen: dict[str, list[str]] = {}
        for row, spelling in CASES:
            is_asked = (given.row or "") in row and (not given.quick or row in _QUICK)
            if is_asked and (spellings is None or spelling in (*spellings, WITHOUT)):
                chosen.setdefault(row, []).append(spelling)
        results = measure(chosen, given.policy or ("bf16", "f16"), given.processes)
        return report(MODULE, results, packages=("numpy",))

    made = read_or_make(given, make)
    print(text(made))
    write(made, given.json)
    return 0 if all(made["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
