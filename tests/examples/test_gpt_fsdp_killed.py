"""Killed and started again, a run of several processes ends with the bits of one in peace."""

import pathlib

import pytest

from benchmarks import faults as benchmark
from benchmarks._killing import Case, compare, random_faults

# Faults in each case: one of each kind on every change, and more before a release.
QUICK = Case("fsdp", "f16", 2)
CASES = [
    pytest.param(QUICK, 2),
    *(pytest.param(case, 4, marks=pytest.mark.slow) for case in benchmark.CASES),
]


@pytest.mark.parametrize(("case", "faults"), CASES, ids=str)
def test_killed_and_resumed_is_uninterrupted(case: Case, faults: int, tmp_path: pathlib.Path):
    chosen = random_faults(faults, case.processes, seed=benchmark.CASES.index(case))
    assert {fault.kind for fault in chosen} == {"step", "save"}
    found = compare(case, chosen, tmp_path)
    assert found["differs"] == []
    assert len(found["faults"]) == faults
    assert all(fault["others_ended_by_themselves"] for fault in found["faults"])
    # One interval, and one more whose checkpoint was being written.
    assert all(0 <= fault["steps_lost"] <= 6 for fault in found["faults"])
    assert (found["skipped"] > 0) == (case.policy == "f16")
