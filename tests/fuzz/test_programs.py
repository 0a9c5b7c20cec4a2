"""Random programs: what `autocast` computes is what the program says."""

import pytest

from tests.fuzz._run import QUESTIONS, outcome

EACH = 10
RUN_EVERY = 30
"""One program in thirty is compiled and run as well, which takes as long as ten that are not."""


@pytest.mark.rows(6)
@pytest.mark.parametrize("first", range(0, 300, EACH))
def test_programs(first: int) -> None:
    outcomes = [
        outcome(seed, QUESTIONS if seed % RUN_EVERY == 0 else ("function",), shrink=60)
        for seed in range(first, first + EACH)
    ]
    for made in outcomes:
        assert not made.failed, f"seed {made.seed}, {made.setting}: {made.text}\n\n{made.program}"
    # One that always gave up would pass, too.
    assert sum(made.text.startswith("same") for made in outcomes) > EACH // 2, outcomes


@pytest.mark.parametrize("seed", [1000238, 1000412, 1000419, 1000257])
def test_programs_that_were_wrong(seed: int) -> None:
    """An island's dead operations, and a constant that a `jax.checkpoint` takes."""
    made = outcome(seed, ("function",))
    assert not made.failed, made.text
