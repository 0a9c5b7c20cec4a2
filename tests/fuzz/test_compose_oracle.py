"""The oracle of composed programs finds what is planted, and nothing else."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from tests.fuzz import _compose_oracle, _compose_run
from tests.fuzz._compose import (
    AROUND_PROGRAM,
    AROUND_STAGE,
    AROUND_STEP,
    DERIVATIVES,
    DRIVES,
    LOOPS,
    Composition,
    Stage,
    composition,
    shrunk_composition,
)
from tests.fuzz._compose_bodies import BODIES
from tests.fuzz._compose_names import Plain
from tests.fuzz._compose_oracle import (
    by_halfstep,
    by_hand,
    errors,
    judge_of,
    program_of,
    references,
    values_of,
)
from tests.fuzz._compose_plant import PLANTED, planted, without_unscaling
from tests.fuzz._compose_run import (
    UPSTREAM,
    changed_by_storing,
    composed_outcome,
    judged,
    report,
)
from tests.fuzz._oracle import as_users_have_it

MOST = 300
"""The number of programs within which a planted error is found."""


def well(seed: int) -> Composition:
    """The first program of a seed."""
    return composition(seed)


def _found(subject: Any, candidates: Any) -> int | None:
    """The first seed whose program fails with an error planted, and passes without."""
    with as_users_have_it():
        for made in candidates:
            if judged(made, subject)[1] and judged(made) == ("same", False):
                return made.seed
    return None


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_found(name: str) -> None:
    # Only long loops are tried, which show it best: the others would take the test's time.
    candidates = (well(seed) for seed in range(MOST))
    long = (made for made in candidates if made.length > 60 and len(made.stages) == 1)
    if name == "swapped carry":
        long = (made for made in map(well, range(MOST)) if "sums" in made.stages[0].body)
    assert _found(planted(name), long) is not None


def test_a_gradient_that_is_not_unscaled_is_found() -> None:
    candidates = (
        made
        for made in map(well, range(MOST))
        if (made.half, made.derivative) == ("f16", "filter") and made.length < 20
    )
    with without_unscaling(), as_users_have_it():
        assert judged(next(candidates))[1]


def test_everything_is_drawn() -> None:
    drawn = [composition(seed) for seed in range(3000)]
    stages = list(itertools.chain.from_iterable(made.stages for made in drawn))
    assert {stage.body for stage in stages} == set(BODIES)
    assert {stage.loop for stage in stages} == set(LOOPS)
    assert {stage.drive for stage in stages} == set(DRIVES)
    assert {name for stage in stages for name in stage.step} == set(AROUND_STEP)
    assert {name for stage in stages for name in stage.whole} == set(AROUND_STAGE)
    assert {name for made in drawn for name in made.outer} == set(AROUND_PROGRAM)
    assert {made.derivative for made in drawn} == set(DERIVATIVES)
    assert {made.run for made in drawn} == {"compiled", "eager", "in NumPy"}
    assert min(made.length for made in drawn) == 3
    assert max(made.length for made in drawn) >= 596


@pytest.mark.parametrize("name", [name for name in AROUND_STAGE if "vmap" in name])
def test_a_mapped_loop_hands_on_its_state_as_one_that_is_not_mapped(name: str) -> None:
    def shapes(body: str, *whole: str) -> Any:
        made = Composition(0, (Stage(body, whole=whole, handed="final"),), 3)
        return jax.eval_shape(functools.partial(program_of(made), Plain()), *values_of(made))

    with as_users_have_it():
        for body in BODIES:
            assert shapes(body, name) == shapes(body), body


@pytest.mark.parametrize("seed", [4, 16, 35])
def test_both_references_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made = well(seed)
    with as_users_have_it():
        evaluated = references(made)
        monkeypatch.setattr(_compose_oracle, "SHORT", 0)
        compiled = references(made)
    # Literals are float32 in the first and float64 in the second.
    for mine, theirs in zip(evaluated, compiled, strict=True):
        worst = max({**errors(mine[0], theirs[0], 0), **errors(mine[1], theirs[1], 0.01)}.values())
        assert worst < 1e-5


@pytest.mark.parametrize("seed", [0, 5, 11])
def test_casts_by_hand_in_float32_pass(seed: int) -> None:
    with as_users_have_it():
        assert judged(well(seed), by_hand) == ("same", False)


def test_a_program_that_jax_refuses_is_not_judged() -> None:
    stage = Stage("running mean", step=("custom_vjp",))
    made = Composition(0, (stage,), 4, outer=("vmap",), run="in NumPy")
    with as_users_have_it():
        assert judged(made) == (UPSTREAM, False)


def test_a_program_that_jax_refuses_is_counted() -> None:
    assert composed_outcome(441).text == UPSTREAM


SUM = Composition(0, (Stage("sum", drive="positive"),), 12, run="in NumPy")


def test_a_result_that_is_no_number_fails() -> None:
    def subject(made: Composition) -> Any:
        results, derivatives = by_halfstep(made)
        return jax.tree.map(lambda leaf: leaf * np.nan, results), derivatives

    with as_users_have_it():
        text, failed = judged(SUM, subject)
    assert failed
    assert "error nan" in text


def test_a_leaf_of_one_number_is_bounded_by_the_worst() -> None:
    with as_users_have_it():
        judge = judge_of(SUM)
    results, bounds = judge.of_hand[0], judge.bounds()[0]
    floor = 2 * judge.eps
    assert bounds["[0]"] == 4 * max(results.values()) + floor
    assert bounds["[1]['out']"] == 4 * results["[1]['out']"] + floor


def test_a_value_that_storing_changes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _compose_run,
        "stored_otherwise",
        lambda made: [("another format", dataclasses.replace(made, half="f16"), {})],
    )
    with as_users_have_it():
        assert changed_by_storing(SUM).startswith("another value with another format: result")


def test_a_composition_is_made_small() -> None:
    made = next(
        made
        for made in map(composition, range(3000))
        if len(made.stages) == 2 and made.stages[1].step and made.stages[0].step and made.outer
    )
    wanted = made.stages[1].step[0]

    def fails(smaller: Composition) -> bool:
        return any(wanted in stage.step for stage in smaller.stages)

    small = shrunk_composition(made, fails)
    assert [len(small.stages), small.outer, small.stages[0].step] == [1, (), (wanted,)]


def test_a_failure_is_printed_as_it_can_be_run(capsys: pytest.CaptureFixture[str]) -> None:
    def subject(made: Composition) -> Any:
        return jax.tree.map(lambda leaf: leaf * 2, by_halfstep(made))

    made = composed_outcome(4, subject=subject, shrink=4, storing=False)
    assert made.failed
    assert "more wrong than by hand" in made.text
    command = made.program.partition('_compose_run "')[2].partition('"\n')[0]
    described = eval(command, {"Composition": Composition, "Stage": Stage})
    assert report(described) == made.program
    # halfstep itself is right on it.
    with as_users_have_it():
        assert judged(described)[0] == "same"
