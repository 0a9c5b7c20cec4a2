"""Parameters that are stored in the compute dtype, as compressed optimizers store them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import optim
from tests._jaxprs import contractions, equations

pytestmark = [pytest.mark.core, pytest.mark.types]

KEY = jax.random.key(0)


def loss(params: Any, x: Any) -> Any:
    """A scan over layers whose carry a bfloat16 weight would make bfloat16 in one place only."""

    def layer(x: Any, params: Any) -> Any:
        x = x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * params["scale"][None]
        return x + jnp.tanh(x @ params["w"] + params["b"][None]), None

    x = x + params["position"]
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean((x @ params["head"]) ** 2)


def start() -> Any:
    keys = jax.random.split(KEY, 3)
    layers = {
        "w": jax.random.normal(keys[0], (3, 64, 64)) / 8,
        "b": jnp.zeros((3, 64)),
        "scale": jnp.ones((3, 64)),
    }
    return {
        "position": jax.random.normal(keys[1], (64, 64)),
        "layers": layers,
        "head": jax.random.normal(keys[2], (64, 64)) / 8,
    }


@pytest.mark.parametrize(
    ("policy", "islands"),
    [
        ("bf16", True),
        ("f16", False),
        pytest.param("bf16", False, marks=pytest.mark.slow),
        pytest.param("f16", True, marks=pytest.mark.slow),
    ],
)
def test_as_if_they_were_float32(policy: str, islands: bool):
    dtype = halfstep.FORMATS[policy].dtype
    exact = start()
    large = jax.tree.map(lambda p: p.astype(dtype) if p.size >= 4096 else p, exact)
    # The same values, so that all that differs is how they are stored.
    exact = jax.tree.map(lambda p: p.astype(jnp.float32), large)
    x = jax.random.normal(jax.random.key(1), (64, 64))
    func = halfstep.autocast(loss, policy, islands=islands)
    value, grads = jax.jit(jax.value_and_grad(func))(large, x)
    wanted, exact_grads = jax.jit(jax.value_and_grad(func))(exact, x)
    eps = halfstep.FORMATS[policy].eps
    np.testing.assert_allclose(value, wanted, rtol=4 * eps)
    for got, like, want in zip(
        jax.tree.leaves(grads), jax.tree.leaves(large), jax.tree.leaves(exact_grads), strict=True
    ):
        assert got.dtype == like.dtype
        off = np.linalg.norm(np.asarray(got, np.float32) - np.asarray(want))
        # A gradient is rounded once more where it is stored, and what lies between differently.
        assert off <= 8 * eps * np.linalg.norm(want)


def test_no_copy_in_float32_is_made():
    large = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.size >= 4096 else p, start())
    x = jax.random.normal(jax.random.key(1), (64, 64))
    jaxpr = jax.make_jaxpr(halfstep.autocast(loss, "bf16"))(large, x).jaxpr
    stacks = [
        var.aval
        for equation in equations(jaxpr)
        for var in equation.outvars
        if var.aval.shape == (3, 64, 64)
    ]
    assert all(aval.dtype == jnp.bfloat16 for aval in stacks)
    dots = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert {str(var.aval.dtype) for e in dots for var in e.invars} == {"bfloat16"}


def test_with_a_compressed_optimizer():
    tx = optim.flash_adamw(1e-2)
    params, state = tx.prepare(start())
    x = jax.random.normal(jax.random.key(1), (64, 64))
    step = halfstep.filter_value_and_grad(loss, policy="bf16")

    @jax.jit
    def train(params: Any, state: Any) -> Any:
        value, _, finite, grads = step(params, x)
        return value, *halfstep.optimizer_update(params, tx, state, grads, finite)

    values = []
    for _ in range(20):
        value, params, state = train(params, state)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    assert params["layers"]["w"].dtype == jnp.bfloat16
    assert params["layers"]["b"].dtype == jnp.float32


def test_a_function_that_is_given_nothing_else_is_written_for_it():
    half = jnp.ones((8, 8), jnp.bfloat16)
    func = halfstep.autocast(lambda w, x: x @ w, "bf16")
    assert func(half, half).dtype == jnp.bfloat16
    # Parameters alone say nothing of what it is written for.
    alone = halfstep.autocast(lambda w, i: jnp.sum(w[i]), "bf16")
    assert alone(half, jnp.arange(3)).dtype == jnp.float32


@pytest.mark.parametrize("policy", ["bf16", "f8"])
def test_data_in_the_compute_dtype_meets_weights_in_float32(policy):
    w = jnp.full((32, 16), 1 / 3, jnp.float32)
    x = jnp.full((16, 32), 1 / 3, jnp.bfloat16)

    def product(w, x):
        return x @ w

    with jax.numpy_dtype_promotion("standard"):
        low = jax.jit(halfstep.autocast(product, policy))(w, x)
        found = contractions(halfstep.autocast(product, policy), w, x)
    assert low.dtype == jnp.float32
    assert found == ["bfloat16" if policy == "bf16" else "float8_e4m3fn"]
