"""What bisect finds: the figures that are kept."""

import json

import pytest

from benchmarks import bisect
from benchmarks._report import RESULTS


@pytest.fixture(scope="module")
def kept():
    return json.loads((RESULTS / "bisect.json").read_text())


def test_what_is_kept(kept):
    assert [row["planted"] for row in kept["planted"]] == [1, 2, 3]
    assert bisect.bars(kept["planted"], kept["vit"]) == kept["bars"]
    assert all(kept["bars"].values())


def test_bars_can_be_missed(kept):
    slow = [{**row, "compiles": 41} for row in kept["planted"]]
    wrong = [{**row, "is_right": False} for row in kept["planted"]]
    for rows in (slow, wrong):
        assert list(bisect.bars(rows, kept["vit"]).values()) == [False] * 3 + [True] * 2
    bad = [{**row, "loss": float("nan")} for row in kept["vit"][1:]]
    assert list(bisect.bars([], [kept["vit"][0], *bad]).values()) == [True, False]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_few_steps():
    rows, found = bisect.vit(2)
    assert len(rows) == 4
    assert found["needed"]
    assert bisect.planted((5,), 8)["is_right"]
