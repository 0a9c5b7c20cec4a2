"""Planted faults: the line, the pass, the turn and the shard of each."""

import os

import jax
import pytest

from halfstep import debug
from tests._faults import FAULTS, Fault
from tests._rows import slow_unless

# NumPy says so when it makes -1e9 a float16.
pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]


# Every third one on each change, all of them before a release.
@pytest.mark.rows(3)
@pytest.mark.parametrize(
    "fault",
    slow_unless(FAULTS, lambda fault: FAULTS.index(fault) % 3 == 0),
    ids=lambda fault: fault.name,
)
def test_the_first_bad_operation(fault: Fault):
    func, args = fault.make()
    found = debug.first_nonfinite(func, *args)
    assert found is not None
    site = found.site
    assert (os.path.basename(site.source.file), site.source.line) == (
        fault.file if fault.line else "",
        fault.line,
    )
    assert (site.stage, found.turns, found.shard) == (fault.stage, fault.turns, fault.shard)
    assert (site.path, site.op in fault.ops or not fault.ops) == (fault.path, True)
    assert 0 < found.count <= found.total
    assert found.reaches
    assert found.advice in str(found)
    assert found.to_dict()["line"] == fault.line


@pytest.mark.rows(2)
@pytest.mark.parametrize("fault", FAULTS[:1] + FAULTS[19:21], ids=lambda fault: fault.name)
def test_a_log_of_every_operation_says_the_same(fault: Fault):
    func, args = fault.make()
    recorder = debug.record(func, sites="ops", last=2)
    log, _ = jax.jit(recorder)(recorder.init(*args), *args)
    found = log.report().found
    assert found is not None
    assert (found.site.source.line, found.site.stage) == (fault.line, fault.stage)
    assert found.turns == fault.turns


def test_there_are_enough():
    assert len(FAULTS) >= 20
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {"JAX", "Equinox", "Linen", "NNX"} == {fault.framework for fault in FAULTS}
