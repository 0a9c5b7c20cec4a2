"""Killed and started again, a run of several processes ends with the bits of one in peace."""

import pathlib

import pytest

from benchmarks import faults as benchmark
from benchmarks._killing import Case, compare, random_faults

# A minute for each case: every night. Processes that end, hang or are preempted are tested on every
# change in `tests/scale/test_processes.py` and `tests/reliability`.
pytestmark = pytest.mark.slow
FAULTS = 4


@pytest.mark.parametrize("case", benchmark.CASES, ids=str)
def test_killed_and_resumed_is_uninterrupted(case: Case, tmp_path: pathlib.Path):
    chosen = random_faults(FAULTS, case.processes, seed=benchmark.CASES.index(case))
    assert {fault.kind for fault in chosen} == {"step", "save"}
    found = compare(case, chosen, tmp_path)
    assert found["differs"] == []
    assert len(found["faults"]) == FAULTS
    assert all(fault["others_ended_by_themselves"] for fault in found["faults"])
    # One interval, and one more whose checkpoint was being written.
    assert all(0 <= fault["steps_lost"] <= 6 for fault in found["faults"])
    assert (found["skipped"] > 0) == (case.policy == "f16")
