"""What saving costs, compared with Orbax alone: the bars can be missed, and memory is seen."""

import numpy as np
import pytest

pytest.importorskip("orbax.checkpoint")

from benchmarks import saving

MEMORY = [(8, 8)]


def run(**changed: float) -> saving.Run:
    return saving.Run(**{"returns": 1.0, "written": 2.0, "restored": 4.0, **changed})


def test_ratios_are_medians_of_neighbors():
    times = [(run(), run(returns=2.0)), (run(), run()), (run(), run(returns=9.0))]
    made = saving.ratios(times, MEMORY)
    assert {row["what"]: row["ratio"] for row in made} == {
        "returns": 2.0,
        "written": 1.0,
        "restored": 1.0,
        "memory": 1.0,
    }


@pytest.mark.parametrize("name", saving.BARS)
def test_a_missed_bar_is_said(name: str):
    if name == "memory":
        made = saving.ratios([(run(), run())], [(8, 100)])
    else:
        made = saving.ratios([(run(), run(**{name: 100.0}))], MEMORY)
    text = saving.text({"bytes": 2e9, "rounds": 1, "rows": made})
    (missed,) = [line for line in text.splitlines() if "**no**" in line]
    assert saving.SAID[name] in missed


def test_memory_is_seen():
    with saving.Memory() as memory:
        taken = np.ones(2**24)
        saving.time.sleep(0.1)
    assert memory.most >= taken.nbytes / 2


@pytest.mark.usefixtures("standard_promotion")
def test_both_restore_what_they_saved():
    ((alone, ours),) = saving.pairs(2**20, 1)
    assert min(*alone, *ours) > 0


@pytest.mark.slow
def test_memory_of_processes():
    ((alone, ours),) = saving.memories(2**26, 1)
    assert min(alone, ours) > 2**20
