"""The page of costs: each figure is a result, and a goal that is missed says what limits it."""

import json
from typing import Any

import pytest

from benchmarks import costs
from benchmarks._report import RESULTS


@pytest.fixture(scope="module")
def made() -> dict:
    return json.loads((RESULTS / "costs.json").read_text())


def test_what_misses_its_goal_says_why(made):
    for cost in costs.costs(made):
        assert cost.is_met or cost.limit, cost.what


def test_every_figure_is_on_the_page(made):
    text = costs.text(made)
    found = costs.costs(made)
    assert all(cost.form.format(cost.now) in text for cost in found)
    assert text.count("| **no** |") == sum(not cost.is_met for cost in found)


def test_goals():
    known: dict[str, Any] = {"what": "", "before": "", "benchmark": ""}
    assert costs.Cost(now=1.0, goal=1.0, **known).is_met
    assert not costs.Cost(now=1.01, goal=1.0, **known).is_met
    assert not costs.Cost(now=1.0, goal=1.01, at_least=True, **known).is_met


def test_a_better_figure_is_told(made):
    def with_temporaries(count: int) -> dict:
        return {**made, "updates": [{**one, "temporary_bytes": count} for one in made["updates"]]}

    best, today, worst = (
        sum(cost.is_met for cost in costs.costs(result))
        for result in (with_temporaries(0), made, with_temporaries(2**33))
    )
    assert worst <= today <= best == worst + len(made["updates"])
    assert len(made["updates"]) == 2
