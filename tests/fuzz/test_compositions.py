"""Composed programs: state in loops, under every transformation, is as exact as cast by hand."""

import pytest

from tests._rows import slow_unless
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
# All but every hundredth program are for the night.
firsts = slow_unless(range(0, COUNT, EACH), lambda first: first % 100 == 0)


@pytest.mark.parametrize("first", firsts)
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


@pytest.mark.parametrize("first", firsts)
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
