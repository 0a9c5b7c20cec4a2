"""Linear solves by iteration, which end at once where the right-hand side is not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.sparse.linalg import cg

import halfstep

pytestmark = pytest.mark.core
SIZE = 8
# More than float16 holds once it is multiplied by a weight, and little for float32.
HUGE = 2.0**15


def matrix() -> jax.Array:
    return 2 * jnp.eye(SIZE) + 0.1 * jnp.ones((SIZE, SIZE))


def solved(params: Any, x: jax.Array) -> jax.Array:
    """The right-hand side is a product in 16 bits, and the matrix a parameter."""
    return cg(lambda v: params["matrix"] @ v, x @ params["w"])[0]


def params() -> Any:
    return {"matrix": matrix(), "w": 8 * jnp.ones((SIZE, SIZE))}


def test_jax_returns_zeros_for_an_infinite_right_hand_side() -> None:
    """Without which nothing of this file would be needed."""
    found, _ = cg(lambda v: matrix() @ v, jnp.full(SIZE, jnp.inf))
    assert not np.any(found)


@pytest.mark.parametrize("jitted", [False, True])
def test_an_overflow_before_the_solve_is_seen_after_it(jitted: bool) -> None:
    function = halfstep.autocast(solved, "f16")
    function = jax.jit(function) if jitted else function
    assert np.all(np.isnan(function(params(), jnp.full(SIZE, HUGE))))
    assert np.all(np.isfinite(function(params(), jnp.ones(SIZE))))


@pytest.mark.parametrize("name", ["matrix", "w"])
def test_an_infinite_cotangent_is_seen_in_the_gradient(name: str) -> None:
    """Also that of the matrix, which is made of the solution for the cotangent."""

    def loss(part: jax.Array, rest: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
        made = solved({**rest, name: part}, x)
        return jnp.sum(made @ (8 * jnp.ones((SIZE, SIZE)))) * scale

    gradient = jax.jit(jax.grad(halfstep.autocast(loss, "f16")))
    others = {other: value for other, value in params().items() if other != name}
    args = params()[name], others, jnp.ones(SIZE) / 64
    assert np.all(np.isfinite(gradient(*args, jnp.float32(1))))
    assert np.any(np.isnan(gradient(*args, jnp.float32(2 * HUGE))))


def test_one_bad_row_of_a_batch_leaves_the_others() -> None:
    x = jnp.ones((3, SIZE)).at[1].set(HUGE)
    found = jax.vmap(halfstep.autocast(solved, "f16"), (None, 0))(params(), x)
    assert np.all(np.isfinite(found), 1).tolist() == [True, False, True]
    # Solved as one: none is silently wrong.
    inside = halfstep.autocast(jax.vmap(solved, (None, 0)), "f16")(params(), x)
    assert not np.any(np.isfinite(inside[1]))


def test_the_solution_of_a_finite_side_is_as_before() -> None:
    rounded = (jnp.ones(SIZE) @ params()["w"]).astype(jnp.float16).astype(jnp.float32)
    exact, _ = cg(lambda v: matrix() @ v, rounded)
    found = halfstep.autocast(solved, "f16")(params(), jnp.ones(SIZE))
    np.testing.assert_allclose(found, exact, rtol=2.0**-20)
