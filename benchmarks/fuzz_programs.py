"""Random programs under `autocast`, as many as one has time for.

    python -m benchmarks.fuzz_programs --count 20000 --json FILE

Each program is evaluated in float64, plain and cast, and must be the same function when roundings
are taken away; half of them are compiled and run as well, and must differ from the exact result by
no more than roundings can explain. With `--composed` the programs are loops that hold state, inside
and around JAX's transformations, and each is compared with float64 and with casts by hand.
`--planted 400` plants errors of 10 % and 1 % in as many
programs each, in values and in gradients, and says how many are found. What fails is printed as
a program that has been made small. The exit status is 1 if something failed.

20,000 programs take hours: FILE is written after every 500, and `--resume` goes on where a run that
was stopped has left it, after what had failed has run again.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import gc
import json
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks._report import parser, report, table, write

MODULE = "benchmarks.fuzz_programs"
CHUNK = 125
"""Programs of one process: JAX keeps what it has compiled, and a process of thousands grows."""
BLOCK = 500
"""Programs after which the results are saved."""
PLANTED = tuple((kind, by) for kind in ("forward", "backward") for by in (0.1, 0.01))
_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_force_host_platform_device_count=4 --xla_allow_excess_precision=false"
)


def _programs(seeds: Sequence[int], run: float, composed: bool) -> list[dict[str, Any]]:
    """Some programs, in this process."""
    from tests.fuzz._compose_run import composed_outcome
    from tests.fuzz._run import QUESTIONS, Outcome, outcome

    # Tracing makes millions of objects that are not garbage: to look for cycles among them as often
    # as Python does takes a fifth of the time.
    gc.set_threshold(200_000, 20, 100)
    rows = []
    for seed in seeds:
        # By the seed, so that a program fails again when it is run alone.
        questions = QUESTIONS if (seed * 2654435761 % 2**32) / 2**32 < run else QUESTIONS[:1]
        start = time.perf_counter()
        try:
            made = (
                composed_outcome(seed, shrink=40)
                if composed
                else outcome(seed, questions, shrink=60)
            )
        except Exception as error:  # A fault of the oracle ends its own program, not the run.
            text = f"the oracle raised {type(error).__name__}: {error}"[:300]
            made = Outcome(seed, text, failed=True)
        rows.append({**dataclasses.asdict(made), "seconds": time.perf_counter() - start})
    return rows


def _planted(seeds: Sequence[int], kind: str, by: float, question: str) -> list[str | None]:
    """Planted errors, in this process: by which question each is found."""
    from tests.fuzz._run import found

    return [found(seed, kind, by, (question,)) for seed in seeds]


def _in_processes(
    work: Callable[[Sequence[int]], list[Any]], seeds: Sequence[int], processes: int, name: str
) -> Iterator[Any]:
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    # Not `fork`: JAX's threads do not survive it.
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(
            processes, mp_context=context, max_tasks_per_child=1
        ) as pool,
        tqdm(total=len(seeds), desc=name, disable=None) as bar,
    ):
        for done in concurrent.futures.as_completed([pool.submit(work, one) for one in chunks]):
            rows = done.result()
            bar.update(len(rows))
            yield from rows


def programs(
    seeds: Sequence[int], run: float, processes: int, composed: bool = False
) -> dict[str, Any]:
    """What became of the programs of some seeds."""
    outcomes: collections.Counter[str] = collections.Counter()
    failures, seconds, redrawn = [], 0.0, 0
    work = functools.partial(_programs, run=run, composed=composed)
    for row in _in_processes(work, seeds, processes, f"from {seeds[0]:,}"):
        seconds += row["seconds"]
        redrawn += row["redrawn"]
        # Numbers in messages differ from program to program.
        kind = re.sub(r"[-\d.e+]*\d", "N", row["text"])[:80]
        outcomes["failed" if row["failed"] else kind] += 1
        if row["failed"]:
            failures.append({name: row[name] for name in ("seed", "setting", "text", "program")})
            print(f"\nseed {row['seed']}, {row['setting']}: {row['text']}", file=sys.stderr)
            print(row["program"], file=sys.stderr)
    return {
        "first_seed": seeds[0],
        "programs": len(seeds),
        "compared": sum(n for kind, n in outcomes.items() if kind.startswith("same")),
        "run": outcomes["same, run"],
        "seconds": round(seconds, 1),
        "composed": composed,
        "redrawn": redrawn,
        "outcomes": dict(outcomes.most_common()),
        "failures": failures,
    }


def added(made: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Two runs as one; the second begins where the first ends."""
    last = made["first_seed"] + made["programs"]
    if more["first_seed"] != last:
        raise ValueError(f"the next run must begin at seed {last}; got {more['first_seed']}")
    return _summed(made, more)


def mended(made: dict[str, Any], run: float, processes: int) -> dict[str, Any]:
    """A run with its failures run again: what was wrong with them may have been mended."""
    if not made["failures"]:
        return made
    failed = [failure["seed"] for failure in made["failures"]]
    outcomes = collections.Counter(made["outcomes"])
    outcomes["failed"] -= len(failed)
    others = made["programs"] - len(failed)
    rest = {**made, "programs": others, "outcomes": outcomes, "failures": []}
    return _summed(rest, programs(failed, run, processes, made.get("composed", False)))


def _summed(made: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    # The sum of two counters leaves out what was counted zero times.
    outcomes = collections.Counter(made["outcomes"]) + collections.Counter(more["outcomes"])
    sums = ("programs", "compared", "run", "seconds", "redrawn")
    return {
        **made,
        # What was saved before there were composed programs has no number of those drawn again.
        **{name: round(made[name] + more[name], 1) for name in sums if name in made},
        "outcomes": dict(outcomes.most_common()),
        "failures": [*made["failures"], *more["failures"]],
    }


def earlier(file: str, first: int, composed: bool = False) -> dict[str, Any] | None:
    """The results of a run that was stopped, if it has saved any."""
    path = pathlib.Path(file)
    if not path.exists():
        return None
    saved = json.loads(path.read_text())
    # What another JAX or another halfstep made of a program says nothing about these.
    now = report(MODULE, {}, packages=())["versions"]
    changed = {
        name: (saved["versions"].get(name), version)
        for name, version in now.items()
        if saved["versions"].get(name) != version
    }
    if saved["programs"].get("composed", False) != composed:
        raise SystemExit(f"{file} has programs of the other kind: pass or leave out --composed.")
    if changed or saved["programs"]["first_seed"] != first:
        raise SystemExit(
            f"{file} must be of the same versions and begin at seed {first} to be resumed; got "
            f"seed {saved['programs']['first_seed']}, and versions (then, now) {changed}. Start "
            "anew without --resume, or pass --first."
        )
    return {name: saved[name] for name in ("programs", "planted")}


def planted(first: int, count: int, processes: int) -> list[dict[str, Any]]:
    """How many planted errors are found, by each question alone."""
    rows = []
    for kind, by in PLANTED:
        row: dict[str, Any] = {"error": f"{by:.0%}", "in": kind}
        for question in ("function", "rounding"):
            work = functools.partial(_planted, kind=kind, by=by, question=question)
            name = f"{by:.0%} {kind}, {question}"
            seeds = range(first, first + count)
            results = [
                result
                for result in _in_processes(work, seeds, processes, name)
                if result is not None
            ]
            row["planted"] = len(results)
            row[question] = sum(result != "" for result in results) / max(len(results), 1)
        rows.append(row)
    return rows


def bars(results: dict[str, Any]) -> dict[str, bool]:
    """What has to hold."""
    ran = results["programs"]
    made = {
        "no program fails": not ran["failures"],
        # One whose programs all say nothing would pass, too.
        "nine of ten programs are compared": ran["compared"] >= 0.9 * ran["programs"] > 0,
    }
    if ran.get("composed"):
        made["one of twenty programs is drawn again"] = ran["redrawn"] <= 0.05 * ran["programs"]
    for row in results["planted"]:
        least = 0.95 if row["error"] == "10%" else 0.6
        name = f"{least:.0%} of errors of {row['error']} found, {row['in']}"
        made[name] = row["function"] >= least
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--count", type=int, default=20_000, help="programs (20,000)")
    options.add_argument("--first", type=int, default=1_000_000, help="the first seed")
    options.add_argument("--run", type=float, default=0.5, help="share that is run (0.5)")
    options.add_argument("--planted", type=int, default=0, help="programs to plant errors in")
    options.add_argument("--resume", action="store_true", help="go on with the run of FILE")
    options.add_argument("--composed", action="store_true", help="loops that hold state")
    options.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parsed = options.parse_args(argv)
    if parsed.resume and parsed.json in (None, "-"):
        options.error("--resume needs --json FILE, the file that it goes on with")
    with tempfile.TemporaryDirectory() as folder:
        # For the processes that are started: they import JAX, this one does not. A quarter of their
        # time would go into compiling single operations, most of which others have compiled before.
        os.environ.update(
            JAX_PLATFORMS="cpu",
            XLA_FLAGS=_FLAGS,
            JAX_COMPILATION_CACHE_DIR=folder,
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        results = _results(parsed)
    made = results["programs"]
    if parsed.composed:
        print(f"{made['redrawn']} programs were drawn again")
    each = made["seconds"] / max(made["programs"], 1)
    print(
        f"{made['programs']} programs, {made['compared']} compared, {made['run']} of them run, "
        f"{each:.2f} seconds each"
    )
    print(
        table(
            [{"n": n, "kind": kind} for kind, n in made["outcomes"].items()],
            {"n": "programs", "kind": "what became of them"},
        )
    )
    if results["planted"]:
        print(table(results["planted"], {name: name for name in results["planted"][0]}))
    write(report(MODULE, results, packages=("numpy", "scipy")), parsed.json)
    return 0 if all(results["bars"].values()) else 1


def _results(parsed: argparse.Namespace) -> dict[str, Any]:
    """All that is asked for, saved after every block."""
    saved = earlier(parsed.json, parsed.first, parsed.composed) if parsed.resume else None
    results = saved or {"planted": []}
    if parsed.planted:
        results["planted"] = planted(parsed.first, parsed.planted, parsed.processes)
    done = results["programs"]["programs"] if "programs" in results else 0
    if done:
        results["programs"] = mended(results["programs"], parsed.run, parsed.processes)
    for block in range(done, parsed.count, BLOCK):
        count = min(BLOCK, parsed.count - block)
        first = parsed.first + block
        seeds = range(first, first + count)
        more = programs(seeds, parsed.run, parsed.processes, parsed.composed)
        results["programs"] = added(results["programs"], more) if block else more
        results["bars"] = bars(results)
        if parsed.json != "-":
            write(report(MODULE, results, packages=("numpy", "scipy")), parsed.json)
    results["bars"] = bars(results)
    return results


if __name__ == "__main__":
    sys.exit(main())
