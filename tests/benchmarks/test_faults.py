"""The report of `benchmarks/faults.py`: its arithmetic. The runs are in `tests/examples`."""

from typing import Any

import pytest

from benchmarks import faults as benchmark
from benchmarks._fault_table import text
from benchmarks._killing import STEPS, Case, random_faults


def row(case: Case, lost: list[int], differs: list[str]) -> dict[str, Any]:
    seen = [
        {
            "steps_lost": steps,
            "was_writing": steps > 2,
            "others_ended_by_themselves": True,
            "seconds_to_end": 0.5 * steps,
        }
        for steps in lost
    ]
    about = {"mode": case.mode, "policy": case.policy, "processes": case.processes}
    return {**about, "faults": seen, "differs": differs, "skipped": 0}


REACTIONS = {
    "limit": 3,
    "ended": [
        {"fault": "hang", "seconds": 3.1, "codes": [1, 1]},
        {"fault": "SIGTERM", "seconds": 0.2, "codes": [0, 0]},
    ],
    "stopped_after": [7, 7],
    "bad_numbers": {
        "nan": [{"finite": False, "scale": 0.5}] * 2,
        "None": [{"finite": True, "scale": 1.0}] * 2,
    },
    "same_bits": True,
    "flipped_after": 3,
    "flipped_found_after": [4, 4],
}


def test_what_is_counted():
    good = row(Case("dp", "f16", 2), [1, 2], [])
    bad = row(Case("fsdp", "f8", 4), [3], ["records"])
    found = benchmark.summarize([good, bad])
    assert (found["injected"], found["survived"], found["while_writing"]) == (3, 2, 1)
    assert (found["steps_lost_mean"], found["steps_lost_max"]) == (2, 3)
    assert found["seconds_to_end_max"] == 1.5
    assert not found["passed"]
    assert benchmark.summarize([good])["passed"]
    shown = text({"summary": found, "rows": [good, bad], "save_every": 3, "reactions": REACTIONS})
    assert "both end well, after the steps 7 and 7" in shown
    assert "With nan in the batch of one process both skipped the step" in shown
    assert "3 processes were killed, 1 of them while" in shown
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()[-2:]]
    assert lines[0] == ["dp", "`f16`", "2", "2", "0", "3", "yes"]
    assert lines[1][-1] == "no"


@pytest.mark.parametrize("processes", [2, 4])
def test_faults_are_of_every_rank_and_kind(processes: int):
    for seed in range(20):
        chosen = random_faults(4, processes, seed)
        assert {fault.rank for fault in chosen} == set(range(processes))
        assert {fault.kind for fault in chosen} == {"step", "save"}
        steps = [fault.step for fault in chosen]
        assert steps == sorted(steps)
        assert 1 <= steps[0] <= steps[-1] < STEPS
    assert random_faults(4, processes, 0) != random_faults(4, processes, 2)


def test_the_full_suite_is_large_enough():
    assert len(benchmark.CASES) * benchmark.FAULTS >= 50
