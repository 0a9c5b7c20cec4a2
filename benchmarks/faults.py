"""Does a run that is killed again and again end with the bits of one that is not?

    python -m benchmarks.faults --json benchmarks/results/faults.json

`examples.gpt_fsdp`, small, in 2 and 4 processes on this machine, data-parallel and fully sharded,
in bfloat16, float16, fp8 and with a flash optimizer. Each run is killed four times: `kill -9` of
one process after the other, at random points and while checkpoints are being written, and started
again. The exit status is 1 unless every run ends with the bits of an uninterrupted one: every leaf,
the loss scale, the ledger, the fp8 state, the place in the data, and the record of every step.
"""

import itertools
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks._fault_table import text
from benchmarks._killing import (
    MODES,
    POLICIES,
    SAVE_EVERY,
    Case,
    compare,
    random_faults,
)
from benchmarks._report import parser, report, write
from tests.scale import _reactions

MODULE = "benchmarks.faults"
CASES = [Case(*row) for row in itertools.product(MODES, POLICIES, (2, 4))]
FAULTS = 4


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What was injected and survived, and what it cost."""
    faults = [fault for row in rows for fault in row["faults"]]
    same = [row for row in rows if not row["differs"]]
    return {
        "injected": len(faults),
        "survived": sum(len(row["faults"]) for row in same),
        "while_writing": sum(fault["was_writing"] for fault in faults),
        "ended_by_themselves": sum(fault["others_ended_by_themselves"] for fault in faults),
        "steps_lost_mean": round(sum(f["steps_lost"] for f in faults) / len(faults), 2),
        "steps_lost_max": max(fault["steps_lost"] for fault in faults),
        "seconds_to_end_max": max(fault["seconds_to_end"] for fault in faults),
        "passed": len(same) == len(rows),
    }


def measure(cases: Sequence[Case], faults: int) -> Iterator[dict[str, Any]]:
    """All cases, one after the other; the results so far after each of them."""
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(tqdm(cases, unit="run")):
        with tempfile.TemporaryDirectory() as folder:
            chosen = random_faults(faults, case.processes, seed=number)
            rows.append(compare(case, chosen, pathlib.Path(folder)))
        yield {"save_every": SAVE_EVERY, "summary": summarize(rows), "rows": rows}


def reactions() -> dict[str, Any]:
    """What happens to one of two processes, and what both do."""
    with tempfile.TemporaryDirectory() as folder:
        seen = [_reactions.react(f, pathlib.Path(folder, f)) for f in _reactions.FAULTS]
        both = _reactions.together(pathlib.Path(folder, "together"))
    return {
        "limit": _reactions.LIMIT,
        "ended": [{name: row[name] for name in ("fault", "seconds", "codes")} for row in seen],
        "stopped_after": [
            result["stopped"]
            for row in seen
            for result in row["results"]
            if row["fault"] == "SIGTERM"
        ],
        "bad_numbers": {
            bad: [
                {"finite": b["finite"], "scale": b["scale"]}
                for b in (x["bad_numbers"][bad] for x in both)
            ]
            for bad in both[0]["bad_numbers"]
        },
        "same_bits": both[0]["bad_numbers"] == both[1]["bad_numbers"],
        "flipped_after": 3,
        "flipped_found_after": [each["flipped"]["step"] for each in both],
    }


def main(argv: Sequence[str] | None = None) -> int:
    made = parser(MODULE, "Killed and started again: the same bits?")
    made.add_argument("--quick", action="store_true", help="two runs only")
    options = made.parse_args(argv)
    cases = CASES[:1] + CASES[-1:] if options.quick else CASES
    found: dict[str, Any] = {}
    seen = reactions()
    for results in measure(cases, FAULTS):
        results = {"reactions": seen, **results}
        found = report(MODULE, results, packages=("orbax-checkpoint", "grain"))
        write(found, options.json if options.json != "-" else None)
    if options.json == "-":
        write(found, options.json)
    print(text(found), file=sys.stderr)
    return 0 if found["summary"]["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
