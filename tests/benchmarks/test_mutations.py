"""Files that somebody has changed: a sample of the benchmark, and what it says if one gets in."""

import json
import pathlib
import random
from typing import Any

import pytest

from benchmarks import mutations


@pytest.mark.parametrize(
    ("kind", "count"), [("checkpoint", 6), ("capture", 6), ("policy", 60), ("cache", 60)]
)
# Where a file cannot be read, Orbax leaves the reads of others behind, which find their event loop
# closed when they are done.
@pytest.mark.rows(2)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nothing_gets_in(kind: str, count: int):
    found = mutations.measure(kind, count, seed=1)
    # A change that is refused or has no effect is wrong only where it took over a second, which is
    # for a machine that does nothing else.
    quiet = (mutations.REFUSED, mutations.SAME)
    assert [row for row in found["wrong"] if row["outcome"] not in quiet] == []
    assert sum(found["outcomes"].values()) == count


def test_what_gets_in_is_counted(monkeypatch: pytest.MonkeyPatch):
    def trusting(entry: pathlib.Path) -> Any:
        return json.loads((entry / "answer.json").read_text())

    kind = mutations.KINDS["cache"]
    made = mutations.Kind(kind.write, trusting, kind.reseal, kind.errors)
    monkeypatch.setattr(mutations, "KINDS", {"cache": made})
    found = mutations.measure("cache", 40)
    assert found["wrong_count"] > 0
    assert mutations.bars([found], 40) == {
        "40 changes": True,
        "no other error, no silent change, nothing over a second": False,
    }


def test_forgeries_change_one_thing():
    value = {"a": [1, {"b": 2}], "c": "text"}
    chance = random.Random(0)
    made = [mutations.forge(value, chance) for _ in range(50)]
    assert all(one != value for one in made)
    assert value == {"a": [1, {"b": 2}], "c": "text"}


@pytest.mark.parametrize(("seconds", "is_missed"), [(0.5, False), (1.5, True)])
def test_what_took_too_long_is_said(seconds: float, is_missed: bool):
    row = {"kind": "policy", "changes": 1, "outcomes": {}, "slowest_seconds": seconds}
    assert ("and a policy did" in mutations.text({"rows": [row]})) == is_missed
