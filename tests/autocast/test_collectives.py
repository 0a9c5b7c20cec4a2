"""Values that devices sum, gather or exchange are as exact, and as wide, as they were before."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

import halfstep
from tests._jaxprs import equations

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]
DEVICES = 4
BODIES: dict[str, Callable[[Array], Array]] = {
    "pmean": lambda x: lax.pmean(x, "d"),
    "psum, then divided": lambda x: lax.psum(x, "d") / 1000.0,
    "psum, times the index": lambda x: lax.psum(x, "d") * (1.1 + lax.axis_index("d")),
    "all_gather": lambda x: jnp.log1p(lax.all_gather(x, "d")),
    "psum_scatter": lambda x: jnp.log1p(lax.psum_scatter(jnp.stack([x] * DEVICES), "d")),
    "ppermute": lambda x: jnp.log1p(lax.ppermute(x, "d", [(0, 1), (1, 0), (2, 3), (3, 2)])),
    "pmax": lambda x: jnp.log1p(lax.pmax(x, "d")),
}
VALUES = jnp.linspace(0.1, 0.9, DEVICES * 3 * 4).reshape(DEVICES, 3, 4)
WEIGHTS = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)


def over_devices(body: Callable[[Array], Array]) -> Callable[[Array], Array]:
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        lambda x: body(x[0])[None], mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False
    )


@pytest.mark.parametrize("name", BODIES)
def test_without_a_product_nothing_is_rounded(name: str):
    func = over_devices(lambda x: BODIES[name](jax.nn.softplus(x)))
    np.testing.assert_array_equal(halfstep.autocast(func, "bf16")(VALUES), func(VALUES))


@pytest.mark.parametrize("name", BODIES)
def test_a_mean_after_a_product_stays_exact(name: str):
    # What devices make of their means is not rounded to the eight bits of bfloat16.
    func = over_devices(lambda x: BODIES[name](jnp.mean(jnp.square(x @ WEIGHTS))))
    result = halfstep.autocast(func, "bf16")(VALUES)
    assert jnp.any(lax.reduce_precision(result, 8, 7) != result)


def test_what_devices_scatter_is_stored_in_16_bits_for_the_backward_pass():
    # One row in four is left of a matrix, but nothing of it was reduced.
    def func(x: Array) -> Array:
        rows = jax.nn.softplus(jnp.tile(x, (DEVICES, 1)) @ WEIGHTS)
        return jnp.exp(jnp.sin(lax.psum_scatter(rows, "d", tiled=True))) @ WEIGHTS

    low = halfstep.autocast(over_devices(func), "bf16")
    kept = jax.make_jaxpr(lambda x: jax.vjp(low, x)[1])(VALUES).jaxpr
    stored: list[Any] = [var.aval for var in kept.outvars if var not in kept.invars]
    rows = [aval for aval in stored if aval.size == VALUES.size]
    assert rows
    assert {aval.dtype for aval in rows} == {np.dtype(jnp.bfloat16)}


def test_axes_order_nothing():
    # Two sums that do not depend on each other: what follows both is one island.
    def func(x: Array) -> Array:
        first, second = lax.psum(x @ WEIGHTS, "d"), lax.psum(x @ WEIGHTS.T, "d")
        return jnp.exp(first) * jnp.exp(second)

    low = halfstep.autocast(over_devices(func), "bf16")
    traced = jax.make_jaxpr(jax.grad(lambda x: low(x).sum()))
    names = [equation.primitive.name for equation in equations(traced(VALUES).jaxpr)]
    assert names.count("remat2") + names.count("checkpoint") <= 1


@jax.custom_vjp
def half_by_vjp(x: Array) -> Array:
    return jnp.full((), 0.5)


half_by_vjp.defvjp(lambda x: (jnp.full((), 0.5), x), lambda x, cotangent: (x * cotangent,))


@jax.custom_jvp
def half_by_jvp(x: Array) -> Array:
    return jnp.full((), 0.5)


half_by_jvp.defjvp(lambda _, tangents: (jnp.full((), 0.5), jnp.sum(tangents[0])))


@pytest.mark.parametrize("half", [half_by_vjp, half_by_jvp])
def test_a_constant_of_a_custom_rule_goes_into_a_shard_map(half: Callable[[Array], Array]):
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    scaled = jax.shard_map(lambda x, y: x * y, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))

    def loss(w: Array, x: Array) -> Array:
        return jnp.sum(scaled(x @ w, half(w)))

    x = jnp.ones((DEVICES, 4))
    made = jax.jit(jax.grad(halfstep.autocast(loss, "bf16")))(WEIGHTS, x)
    np.testing.assert_allclose(made, jax.grad(loss)(WEIGHTS, x), rtol=jnp.finfo("bfloat16").eps)
