"""Float16: what only float32 can hold is not stored in float16 between contractions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep._autocast.planning import LARGEST
from halfstep._autocast.tracing import trace
from halfstep._autocast.transform import settings_of
from halfstep._policy.policy import as_policy
from tests.autocast._shared import stored_as

pytestmark = pytest.mark.core
W = {"a": jnp.eye(4) * 1000.0, "b": jnp.eye(4)}
X = jnp.full((2, 4), 3.0)


def squared(w, x):
    h = jnp.square(x @ w["a"])
    y = jnp.tanh(h * 1e-7) @ w["b"]
    return jnp.sum(y * h) * 1e-7


def scanned(w, x):
    def body(h, _):
        large = jnp.square(h @ w["a"])
        return (jnp.tanh(large * 1e-7) @ w["b"] * large) * 1e-7, None

    return jnp.sum(jax.lax.scan(body, x, None, length=1)[0])


@pytest.mark.parametrize("islands", [True, False])
@pytest.mark.parametrize("func", [squared, scanned])
def test_what_was_finite_stays_finite(func: Any, islands: bool):
    expected = func(W, X)
    found = halfstep.autocast(func, stored_as("f16", islands))
    for value in (found(W, X), jax.jit(found)(W, X)):
        assert value == pytest.approx(float(expected), rel=2**-8)


@pytest.mark.parametrize("islands", [True, False])
def test_gradients_are_those_of_float32(islands: bool):
    found = jax.grad(halfstep.autocast(squared, stored_as("f16", islands)))(W, X)
    expected = jax.grad(squared)(W, X)
    for name in W:
        assert np.allclose(found[name], expected[name], rtol=2**-6, atol=2**-9)


def wide_and_low(func: Any, policy: str = "f16") -> tuple[set[str], set[str]]:
    """The makers of what stays float32 after a contraction, and of what does not."""
    plan = trace(func, settings_of(as_policy(policy)), (W, X), {}, params=[0], keep=()).plan

    def makers(numbers: frozenset[int]) -> set[str]:
        found = map(plan.maker, numbers)
        return {plan.graph.nodes[index].name for index in found if index is not None}

    return makers(plan.too_large), makers(plan.rounded)


BOUNDED = {
    "tanh": lambda h: jnp.tanh(h),
    "logistic": lambda h: jax.nn.sigmoid(h),
    "mul": lambda h: h * jax.nn.sigmoid(h),
    "div": lambda h: jnp.sqrt(jnp.tanh(h) ** 2) / 7.0,
    "select_n": lambda h: jnp.where(h > 0, jnp.sin(h), 3.0),
    "clamp": lambda h: jax.lax.clamp(-6.0, jnp.exp(h), 6.0),
    "reduce_max": lambda h: jnp.max(jnp.tanh(h), axis=-1, keepdims=True) + jnp.sin(h),
}


@pytest.mark.parametrize("name", BOUNDED)
def test_what_is_known_to_fit_is_held_in_float16(name: str):
    def func(w, x):
        made = BOUNDED[name](x @ w["a"])
        return jnp.sum((made @ w["b"]) * made)

    wide, low = wide_and_low(func)
    last = "add" if name == "reduce_max" else name
    assert last in low
    assert last not in wide


UNBOUNDED = {
    "square": lambda h: jnp.square(h),
    "exp": lambda h: jnp.exp(h),
    "add": lambda h: jnp.sin(h) + jnp.exp(h),
    "div": lambda h: jnp.tanh(h) / (h + 1.0),
    "mul": lambda h: jnp.tanh(h) * 1e5,
    "optimization_barrier": lambda h: jax.lax.optimization_barrier((jnp.tanh(h), jnp.exp(h)))[1],
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_what_may_be_larger_stays_float32(name: str):
    def func(w, x):
        made = UNBOUNDED[name](x @ w["a"])
        return jnp.sum((jnp.tanh(made) @ w["b"]) * made)

    assert name in wide_and_low(func)[0]
    # Bfloat16 has the range of float32.
    assert wide_and_low(func, "bf16")[0] == set()


def test_explain_says_so():
    said = "stay float32: they may be larger than float16 holds"
    assert any(said in note for note in halfstep.explain(squared, "f16")(W, X).notes)
    assert not any(said in note for note in halfstep.explain(squared, "bf16")(W, X).notes)


def test_the_largest_is_that_of_float16():
    assert jnp.finfo(jnp.float16).max == LARGEST
