"""A gather that takes one element of each row has a gradient without a scatter."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
from tests.autocast._shared import every_format, half_eps, traced

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]

ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 7)), jnp.float32)
# Counted from the end, beyond the end, and the same twice.
WHICH = jnp.array([[1, 0, 6, 3, 2], [-1, 5, 9, 2, 2]])


def own_places(rows: Any, which: Any) -> Any:
    return rows[jnp.arange(2)[:, None], jnp.arange(5), which]


TAKEN: dict[str, Callable[[Any, Any], Any]] = {
    "take_along_axis": lambda rows, which: jnp.take_along_axis(rows, which[..., None], -1),
    "first axis": lambda rows, which: jnp.take_along_axis(
        rows, jnp.broadcast_to(which[:1, :, None] % 2, (1, 5, 7)), 0
    ),
    "middle axis": lambda rows, which: jnp.take_along_axis(rows[:, :, :5], which[:, None], 1),
    "own places of a matrix": lambda rows, which: rows[1][jnp.arange(5), which[0]],
    "own places": own_places,
    "own places of columns": lambda rows, which: rows[0, :, :5][which[0], jnp.arange(5)],
    "mapped index": lambda rows, which: jax.vmap(jax.vmap(lambda x, n: x[n]))(rows, which),
    "mapped take": jax.vmap(lambda rows, which: jnp.take_along_axis(rows, which[:, None], -1)),
    "mapped own places": jax.vmap(lambda rows, which: rows[jnp.arange(5), which]),
    "clipped": lambda rows, which: jnp.take_along_axis(rows, which[..., None], -1, mode="clip"),
    "cross entropy": lambda rows, which: optax.softmax_cross_entropy_with_integer_labels(
        rows, which % 7
    ),
}
OTHERS: dict[str, Callable[[Any, Any], Any]] = {
    "two of a row": lambda rows, which: jnp.take_along_axis(
        rows, jnp.stack([which, which], -1), -1
    ),
    "rows in another order": lambda rows, which: rows[0][jnp.arange(5)[::-1], which[0]],
    "rows from the second on": lambda rows, which: rows[0][jnp.arange(4) + 1, which[0, :4]],
    "some rows": lambda rows, which: rows[0][jnp.arange(4), which[0, :4]],
    "rows by numbers": lambda rows, which: rows[0][which[0], which[0]],
    "whole rows": lambda rows, which: rows[0][which[0]],
}


def loss(take: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda rows: jnp.sum(jnp.sin(jnp.nan_to_num(take(rows, WHICH))))


def is_taken(func: Callable[..., Any]) -> bool:
    return any(one.primitive.name == "halfstep_one_of_row" for one in traced(jax.grad(func), ROWS))


@pytest.mark.parametrize("name", TAKEN)
def test_no_scatter_is_as_large_as_the_rows(name: str):
    scatters = [
        one.outvars[0].aval.shape
        for one in traced(jax.grad(halfstep.autocast(loss(TAKEN[name]), "bf16")), ROWS)
        if one.primitive.name.startswith("scatter") and one.outvars[0].aval.size >= 25
    ]
    assert not scatters


@pytest.mark.parametrize("name", [*TAKEN, *OTHERS])
def test_only_these_gathers_are_replaced(name: str):
    low = halfstep.autocast(loss({**TAKEN, **OTHERS}[name]), "bf16")
    assert is_taken(low) == (name in TAKEN)


@every_format
@pytest.mark.parametrize("name", [*TAKEN, *OTHERS])
def test_values_and_derivatives(name: str, policy: str):
    plain = loss({**TAKEN, **OTHERS}[name])
    low = halfstep.autocast(plain, policy)
    both = jnp.stack([ROWS, 2 * ROWS])
    ways: dict[str, Callable[[Any], Any]] = {
        "value": lambda func: func(ROWS),
        "reverse": lambda func: jax.grad(func)(ROWS),
        "forward": lambda func: jax.jvp(func, (ROWS,), (ROWS,))[1],
        "second": lambda func: jax.jvp(jax.grad(func), (ROWS,), (ROWS,))[1],
        "mapped": lambda func: jax.vmap(jax.grad(func))(both),
        "mapped last": lambda func: jax.vmap(jax.grad(func), -1)(jnp.moveaxis(both, 0, -1)),
        "compiled": lambda func: jax.jit(jax.grad(func))(ROWS),
        "made again": lambda func: jax.grad(jax.checkpoint(func))(ROWS),
    }
    for way, call in ways.items():
        ours, theirs = call(low), call(plain)
        # Some roundings of numbers below 4, and of sums of up to 10 of them.
        atol = 80 * half_eps(policy)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol, err_msg=way)


def test_indices_that_are_mapped_alone():
    take = halfstep.autocast(lambda which: loss(lambda rows, _: own_places(rows, which))(ROWS))
    several = jnp.stack([WHICH, WHICH + 1])
    ours = jax.vmap(take)(several)
    np.testing.assert_array_equal(ours, jnp.stack([take(which) for which in several]))

    def gradient(which: Any) -> Any:
        return jax.grad(halfstep.autocast(loss(lambda rows, _: own_places(rows, which))))(ROWS)

    mapped = jax.vmap(gradient)(several)
    np.testing.assert_array_equal(mapped, jnp.stack([gradient(which) for which in several]))


def test_indices_in_8_bits():
    rows, which = jnp.arange(1500.0).reshape(5, 300), jnp.array([255, 1, 0, 44, 254], jnp.uint8)

    def picked(rows: Any) -> Any:
        return jnp.sum(rows[jnp.arange(5), which])

    gradient = jax.grad(halfstep.autocast(picked, "bf16"))(rows)
    np.testing.assert_array_equal(gradient, jax.grad(picked)(rows))


def test_places_that_start_over_are_not_the_rows():
    rows, which = jnp.arange(1500.0).reshape(300, 5), jnp.arange(300) % 5

    def picked(rows: Any) -> Any:
        return jnp.sum(rows[jnp.arange(300).astype(jnp.uint8), which])

    low = halfstep.autocast(picked, "bf16")
    np.testing.assert_array_equal(jax.grad(low)(rows), jax.grad(picked)(rows))
