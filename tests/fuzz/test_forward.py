"""How values are stored for the backward pass never changes a value of the forward pass."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from tests._rows import slow_unless
from tests.fuzz._forward import differences, in_parts, results
from tests.fuzz._oracle import Skipped, as_users_have_it, make_case

EACH = 5


@pytest.mark.parametrize(
    "first", slow_unless([(first,) for first in range(0, 560, EACH)], lambda first: first < EACH)
)
def test_forward_values_do_not_depend_on_what_is_stored(first: int):
    compared = 0
    for seed in range(first, first + EACH):
        try:
            found = differences(seed)
        except Skipped:
            continue
        compared += 1
        assert not found, found[0]
    assert compared > EACH // 2


def test_a_difference_is_found():
    case = make_case(0)

    def moved(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            made = function(*values)
            return tuple(2 * x if jnp.issubdtype(x.dtype, jnp.floating) else x for x in made)

        return run

    with as_users_have_it():
        plain, other = (results(in_parts(case, wrap), case) for wrap in (lambda f: f, moved))
    assert any(one.tobytes() != two.tobytes() for one, two in zip(plain, other, strict=True))
