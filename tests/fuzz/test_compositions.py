"""Composed programs: state in loops, under every transformation, is as exact as cast by hand."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.fuzz._compose import composition
from tests.fuzz._compose_run import (
    UPSTREAM,
    asks_about_storing,
    changed_by_storing,
    composed_outcome,
    report,
)
from tests.fuzz._oracle import as_users_have_it

EACH = 20
COUNT = 300
"""In the night, `python -m benchmarks.fuzz_programs --composed` runs others."""
firsts = range(0, COUNT, EACH)
# Known faults: these programs fail until they are mended.
WRONG = {
    60: "seed 76: a derivative over reverse is 1.26 times its bound from casts by hand",
}


def marked(known: Mapping[int, str]) -> pytest.MarkDecorator:
    """Mark what is known to fail, and all but every hundredth program for the night."""
    rows: list[Any] = []
    for first in firsts:
        marks = [] if first % 100 == 0 else [pytest.mark.slow]
        if first in known:
            marks.append(pytest.mark.xfail(strict=True, reason=known[first]))
        rows.append(pytest.param(first, marks=marks))
    return pytest.mark.parametrize("first", rows)


@marked(WRONG)
def test_compositions(first: int) -> None:
    outcomes = [
        composed_outcome(seed, shrink=30, storing=False) for seed in range(first, first + EACH)
    ]
    for made in outcomes:
        assert not made.failed, f"seed {made.seed}, {made.setting}: {made.text}\n\n{made.program}"
    # One that always gave up would pass, too.
    assert all(made.text in ("same", UPSTREAM) for made in outcomes), outcomes
    assert sum(made.text == UPSTREAM for made in outcomes) <= EACH / 20, outcomes
    # At most one program of twenty is drawn again.
    assert sum(made.redrawn for made in outcomes) <= EACH / 20, outcomes


@marked({})
def test_what_is_stored_changes_no_value(first: int) -> None:
    asked = [
        made
        for made in map(composition, range(first, first + EACH))
        # Twice as few as in the night: what is stored is not what most of these are about.
        if asks_about_storing(made) and made.seed % 2 == 0
    ]
    with as_users_have_it():
        for made in asked:
            changed = changed_by_storing(made)
            assert not changed, f"seed {made.seed}: {changed}\n\n{report(made)}"
