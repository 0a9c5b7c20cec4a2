"""`jax.export` with a batch that has no number yet: forward, gradients, and its own derivative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import halfstep

pytestmark = pytest.mark.core
POLICIES = ("bf16", "f16", "f8", "bf16,residuals=e4m3")
W = jax.random.normal(jax.random.key(0), (32, 32)) / 5
# Large enough for residuals in 8 bits, as a batch without a number is taken to be.
X = jax.random.normal(jax.random.key(1), (64, 32))


def model(w, x):
    h = jax.nn.gelu(x @ w) + x
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)
    h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=2)
    return jax.nn.softmax(h @ w)


def shapes():
    (batch,) = export.symbolic_shape("b")
    return jax.ShapeDtypeStruct((32, 32), jnp.float32), jax.ShapeDtypeStruct((batch, 32), "f4")


@pytest.mark.parametrize("policy", POLICIES)
def test_exported_for_three_platforms(policy: str):
    func = jax.jit(halfstep.autocast(model, policy))
    exported = export.export(func, platforms=["cpu", "cuda", "tpu"])(*shapes())
    assert np.array_equal(exported.call(W, X), func(W, X))


@pytest.mark.rows(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients(policy: str):
    @jax.jit
    def gradient(w, x):
        return jax.grad(lambda w: jnp.mean(halfstep.autocast(model, policy)(w, x) ** 2))(w)

    assert np.array_equal(export.export(gradient)(*shapes()).call(W, X), gradient(W, X))


def test_the_derivative_of_what_was_exported():
    func = halfstep.autocast(model, "bf16")
    exported = export.deserialize(export.export(jax.jit(func))(*shapes()).serialize(vjp_order=1))

    def slope(func):
        return jax.grad(lambda w: jnp.sum(func(w, X)[:, 0]))(W)

    error = jnp.linalg.norm(slope(exported.call) - slope(func)) / jnp.linalg.norm(slope(func))
    assert float(error) < float(jnp.finfo(jnp.bfloat16).eps)
