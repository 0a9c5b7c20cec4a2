"""The flat graph of a traced function has the operations that run, and no others."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxtyping import Array

import halfstep
from halfstep._program import Constant, graph_of

SIZES = jnp.asarray([2, 3])


def names(func: Callable[..., Array], *args: Array) -> list[str]:
    return [node.name for node in graph_of(jax.make_jaxpr(func)(*args)).nodes]


def test_an_operation_that_nothing_reads_is_left_out():
    def func(x: Array) -> Array:
        unread = jnp.tanh(x)
        _ = jnp.exp(unread)
        return jnp.sin(x)

    assert names(func, jnp.ones(3)) == ["sin"]


def test_an_operation_with_an_effect_stays():
    def func(x: Array) -> Array:
        jax.debug.print("{}", jnp.cos(x))
        return jnp.sin(x)

    assert names(func, jnp.ones(3))[0] == "cos"
    assert len(names(func, jnp.ones(3))) == 3


@pytest.mark.usefixtures("standard_promotion")
def test_dead_code_that_jax_cannot_map_is_not_mapped():
    # JAX cannot map a product of groups over any dimension but the first, and drops this one.
    @jax.jit
    def unread(x: Array) -> Array:
        _ = lax.ragged_dot(jnp.resize(x, (5, 3)), jnp.resize(x, (2, 3, 4)), SIZES)
        return x

    def loss(w: Array, x: Array) -> Array:
        return jnp.sum(unread(x @ w))

    weights, values = jnp.ones((2, 4, 4)), jnp.ones((2, 3, 4))
    wanted = jax.vmap(jax.grad(loss))(weights, values)
    made = jax.vmap(jax.grad(halfstep.autocast(loss, "bf16")))(weights, values)
    assert jnp.allclose(made, wanted, rtol=8 * jnp.finfo(jnp.bfloat16).eps)


def test_arithmetic_on_numbers_is_a_number():
    def scaled(x: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.float32(64)) + 1 / jnp.sqrt(16.0)

    graph = graph_of(jax.make_jaxpr(scaled)(jnp.ones(2)))
    assert [node.name for node in graph.nodes] == ["div", "add"]
    operands = [operand for node in graph.nodes for operand in node.ins]
    assert [float(one.value) for one in operands if isinstance(one, Constant)] == [8, 0.25]


def test_other_arithmetic_stays():
    def whole(x: jax.Array) -> jax.Array:
        return x + jnp.sin(jnp.sqrt(2.0)) + jnp.arange(2.0)

    names = [node.name for node in graph_of(jax.make_jaxpr(whole)(jnp.ones(2))).nodes]
    assert "sin" in names
    assert "iota" in names
    assert "sqrt" not in names
