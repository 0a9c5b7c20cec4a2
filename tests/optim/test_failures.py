"""What breaks in other compressed optimizers, each as a test."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from halfstep import optim, quant
from tests.optim._values import values

RATE = 1e-3
SHAPE = (128, 64)


def moved(tx: Any, grads: Any, *, start: float = 0.0) -> np.ndarray:
    """How far float32 parameters go by a sequence of gradients, in learning rates."""
    params = {"w": jnp.full(SHAPE, start)}
    before, state = params["w"], tx.init(params)
    step = jax.jit(tx.step)
    for grad in grads:
        before = params["w"]
        params, state = step(params, state, {"w": grad})
    return np.asarray(params["w"] - before) / RATE


def noise(sigma: float, steps: int = 5) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), steps)
    return [sigma * jax.random.normal(key, SHAPE) for key in keys]


@pytest.mark.parametrize("steps", [1, 5])
def test_one_large_gradient_does_not_throw_its_neighbors(steps: int):
    grads = [grad.at[7, 3].multiply(500) for grad in noise(1e-2, steps)]
    far = np.abs(moved(optim.flash_adam(RATE), grads))
    assert far.max() <= 1.5


@pytest.mark.parametrize("sigma", [1e-12, 1e-7, 3e-7, 1e-6, 1.0, 1e6])
@pytest.mark.usefixtures("standard_promotion")
def test_gradients_of_any_size(sigma: float):
    grads = noise(sigma)
    ours, theirs = moved(optim.flash_adam(RATE, eps=0.0), grads), by_optax(grads)
    # The first moment is off by half a code of its group's largest, the second one by a code at
    # the least; together below a twentieth of a learning rate where Adam steps by one.
    assert np.abs(ours - theirs).mean() < 0.05
    assert np.abs(ours).max() <= 1.5 * np.abs(theirs).max()


def by_optax(grads: Any) -> np.ndarray:
    tx = optax.adam(RATE, eps=0.0)
    params, state = {"w": jnp.zeros(SHAPE)}, tx.init({"w": jnp.zeros(SHAPE)})
    updates: Any = None
    for grad in grads:
        updates, state = tx.update({"w": grad}, state, params)
    return np.asarray(updates["w"]) / RATE


@pytest.mark.parametrize("value", [7e5, 1e18])
def test_a_large_constant_gradient(value: float):
    far = moved(optim.flash_adam(RATE), [jnp.full(SHAPE, value)] * 3)
    np.testing.assert_allclose(far, -1, atol=2**-7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["flash_adamw", "flash_lion", "flash_sgd"])
def test_a_poisoned_element_is_contained(name: str, bad: float):
    options: Any = {"momentum": 0.9} if name == "flash_sgd" else {}
    tx = getattr(optim, name)(RATE, **options)
    params, state = tx.prepare({"w": jnp.ones(SHAPE)})
    clean = noise(1.0, 1)[0]
    new, new_state = tx.step(params, state, {"w": clean.at[7, 3].set(bad)})
    other, _ = tx.step(params, state, {"w": clean.at[7, 3].set(0)})
    where = np.zeros(SHAPE, bool)
    where[7, 3] = True
    got, wanted = np.asarray(new["w"], np.float32), np.asarray(other["w"], np.float32)
    np.testing.assert_array_equal(got[~where], wanted[~where])
    assert got[7, 3] == 1
    assert all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in jax.tree.leaves(new_state))


@pytest.mark.parametrize("finite", [False, jnp.asarray(False)])
def test_a_step_is_skipped_as_a_whole(finite: Any):
    tx = optim.flash_adamw(RATE)
    params, state = tx.prepare({"w": jnp.ones(SHAPE), "b": jnp.ones(3)})
    grads = {"w": jnp.full(SHAPE, jnp.nan), "b": jnp.ones(3)}
    new = tx.step(params, state, grads, finite)
    for got, was in zip(jax.tree.leaves(new), jax.tree.leaves((params, state)), strict=True):
        np.testing.assert_array_equal(got, was)


def stale(rounding: Any) -> float:
    """The relative error of the second moment, long after gradients have become smaller."""
    tx: Any = optim.flash_adam(RATE, b2=0.999, rounding=rounding)
    params = {"w": jnp.zeros(SHAPE)}
    state, exact = tx.init(params), jnp.zeros(SHAPE)
    sigmas = jnp.where(jnp.arange(2000) < 1000, 1.0, 0.1)

    def body(carry: Any, given: Any) -> Any:
        (params, state), exact = carry
        sigma, key = given
        grad = sigma * jax.random.normal(key, SHAPE)
        made = tx.step(params, state, {"w": grad})
        return (made, 0.999 * exact + 0.001 * grad * grad), None

    given = (sigmas, jax.random.split(jax.random.key(0), 2000))
    ((_, state), exact), _ = jax.lax.scan(body, ((params, state), exact), given)
    got = quant.dequantize(state.second["w"], "root8")
    return float(jnp.mean(jnp.abs(jnp.sqrt(got / exact) - 1)))


@pytest.mark.slow
def test_a_long_memory_forgets_with_stochastic_rounding():
    nearest, stochastic = stale("nearest"), stale("stochastic")
    assert stochastic < 0.05
    assert stochastic < nearest / 2


@pytest.mark.parametrize(
    ("options", "stalls"),
    [({}, True), ({"master_bits": 32}, False), ({"rounding": "stochastic"}, False)],
    ids=str,
)
def test_steps_below_the_last_of_24_bits(options: Any, stalls: bool):
    """At 1.9 a unit of 24 bits is 2**-15: steps of 1e-5 are lost, or add up."""
    tx = optim.flash_adam(1e-5, **options)
    params, state = tx.prepare({"w": jnp.full(SHAPE, 1.9)})
    grads = {"w": jnp.ones(SHAPE, jnp.bfloat16)}
    step = jax.jit(tx.step)
    for _ in range(100):
        params, state = step(params, state, grads)
    far = np.asarray(1.9 - values(params, state)["w"])
    if stalls:
        assert far.max() < 2**-15
    else:
        # Of 8192 elements; a random walk of 100 steps of a unit each at most.
        assert abs(far.mean() / 1e-3 - 1) < 4 * 2**-15 * 10 / 1e-3 / np.sqrt(far.size) + 0.01


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.usefixtures("standard_promotion")
def test_applied_updates_are_the_step(bits: Any):
    tx: Any = optim.flash_adamw(RATE, master_bits=bits)
    key = jax.random.key(0)
    params, state = tx.prepare({"w": jax.random.normal(key, SHAPE), "b": jnp.ones(3)})
    other: Any = params
    other_state: Any = state
    for number in range(3):
        grads = jax.tree.map(
            lambda p: jax.random.normal(jax.random.fold_in(key, number), p.shape, p.dtype),  # noqa: B023
            params,
        )
        params, state = tx.step(params, state, grads)
        updates, other_state = tx.update(grads, other_state, other)
        other = optax.apply_updates(other, updates)
    np.testing.assert_array_equal(params["w"], other["w"])
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(other_state), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("bits", [24, 32])
def test_a_parameter_that_was_changed_without_its_rest(bits: Any):
    """A weight near zero may be rounded to zero by `optax.apply_updates`; its rest is negative."""
    tx: Any = optim.flash_adamw(RATE, master_bits=bits)
    params = {"w": jnp.zeros(SHAPE, jnp.bfloat16)}
    state = tx.init(params)
    state = state._replace(low={"w": jnp.full_like(state.low["w"], -7)})
    params, state = tx.step(params, state, {"w": jnp.ones(SHAPE, jnp.bfloat16)})
    np.testing.assert_allclose(values(params, state)["w"], -RATE, rtol=2**-7)
