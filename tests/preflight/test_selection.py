"""What is selected is the best there is, by trying all of them."""

import itertools
import random

import numpy as np
import pytest

from halfstep._preflight.planning.selection import (
    Form,
    Problem,
    Recomputation,
    Selection,
    select,
    selection,
)


def drawn(seed: int, count: int = 7) -> Problem:
    """A random graph: values 0 and 1 are arguments, and each operation makes one or two more."""
    choice = random.Random(seed)
    operations: list[Recomputation] = []
    values = 2
    for _ in range(count):
        takes = tuple(choice.sample(range(values), min(values, choice.choice((1, 2, 2, 3)))))
        makes = tuple(range(values, values + choice.choice((1, 1, 1, 2))))
        values += len(makes)
        pure = choice.random() > 0.1
        operations.append(Recomputation(takes, makes, choice.randint(1, 50), is_pure=pure))
    # Some groups hold two values, as where one line makes both.
    numbers = [number // choice.choice((1, 1, 2)) for number in range(values)]
    names = sorted(set(numbers[2:]))
    group_of = (None, None, *(names.index(number) for number in numbers[2:]))
    groups = []
    for name in names:
        size = choice.randint(1, 30) * 2 * numbers[2:].count(name)
        groups.append((Form("keep", size), Form("e4m3", size // 2, 1.0, size / 100)))
    needed = frozenset(value for value in range(values) if choice.random() < 0.6)
    return Problem(tuple(operations), tuple(groups), group_of, needed)


def best(problem: Problem, memory: float, error: float) -> Selection | None:
    found: list[Selection] = []
    for forms in itertools.product(*[(None, *forms) for forms in problem.groups]):
        stored = {group: form for group, form in enumerate(forms) if form is not None}
        try:
            made = selection(problem, stored)
        except ValueError:
            continue
        if made.bytes <= memory and made.error <= error:
            found.append(made)
    return min(found, key=lambda made: (made.seconds, made.bytes), default=None)


@pytest.mark.rows(3)
@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_best_of_all(seed: int):
    problem = drawn(seed)
    everything = sum(forms[0].bytes for forms in problem.groups)
    for share, error in itertools.product((0.0, 0.2, 0.5, 1.0), (np.inf, 0.3, 0.0)):
        want = best(problem, share * everything, error)
        got = select(problem, memory=share * everything, error=error)
        assert (want is None) == (got is None)
        if want is not None and got is not None:
            assert got.bytes <= share * everything
            assert got.error <= error + 1e-9
            # The gap at which the solver stops.
            assert got.seconds <= want.seconds * 1.001


def test_a_chain_by_hand():
    """Four values in a row, of which the last two are needed."""
    chain = tuple(Recomputation((i,), (i + 1,), seconds=10.0) for i in range(4))
    forms = tuple((Form("keep", 100),) for _ in range(4))
    problem = Problem(chain, forms, (None, 0, 1, 2, 3), frozenset({3, 4}))
    assert set(select(problem, memory=200).stored) == {2, 3}  # type: ignore[union-attr]
    one = select(problem, memory=100)
    assert one is not None
    # Storing the third value spares three operations, storing the fourth only one.
    assert set(one.stored) == {2}
    assert one.again == {3}
    none = select(problem, memory=0)
    assert none is not None
    assert none.again == {0, 1, 2, 3}


def test_what_must_not_run_again_is_stored():
    operations = (Recomputation((0,), (1,), 1.0, is_pure=False), Recomputation((1,), (2,), 1.0))
    problem = Problem(
        operations, ((Form("keep", 8),), (Form("keep", 8),)), (None, 0, 1), frozenset({2})
    )
    found = select(problem, memory=8)
    assert found is not None
    assert found.bytes == 8
    assert select(problem, memory=7) is None
    with pytest.raises(ValueError, match="value 1 is neither stored nor can be made again"):
        selection(problem, {})
