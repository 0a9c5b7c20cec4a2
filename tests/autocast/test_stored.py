"""Parameters that are stored in the compute dtype, as compressed optimizers store them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import optim
from tests._jaxprs import contractions, equations
from tests.autocast._shared import stored_as

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


@pytest.mark.rows(1)
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
    func = halfstep.autocast(loss, stored_as(policy, islands))
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
    # Of parameters alone it makes what it makes without autocast, and adds up in float32.
    alone = halfstep.autocast(lambda w, i: jnp.sum(w[i]), "bf16")
    assert alone(half, jnp.arange(3)).dtype == jnp.bfloat16


def test_a_loss_of_parameters_in_16_bits_is_float32():
    table = jnp.linspace(0, 1, 64).reshape(8, 8).astype(jnp.bfloat16)
    loss, *_ = halfstep.filter_value_and_grad(lambda w, i: jnp.mean(w[i] ** 2))(
        table, jnp.arange(8)
    )
    assert loss.dtype == jnp.float32
    exact = jnp.mean(table.astype(jnp.float32) ** 2)
    assert jnp.allclose(loss, exact, rtol=float(jnp.finfo(jnp.float32).eps) * 64)


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


def test_results_have_the_dtypes_that_they_have_without_it():
    def step(params, x):
        return {"w": params["w"] * 0.9}, jnp.sum(x @ params["w"].astype(jnp.float32))

    params, x = {"w": jnp.ones((4, 4), jnp.bfloat16)}, jnp.ones((2, 4))
    lowered = halfstep.autocast(step, "bf16")
    assert lowered(params, x)[0]["w"].dtype == jnp.bfloat16
    carried, _ = jax.lax.scan(lambda c, _: lowered(c, x), params, None, length=2)
    assert jnp.allclose(carried["w"].astype(jnp.float32), 0.81, rtol=2**-7)


def test_so_has_aux():
    def loss(params, x):
        return jnp.sum(x @ params["w"].astype(jnp.float32)), {"w": params["w"]}

    params, x = {"w": jnp.ones((4, 4), jnp.bfloat16)}, jnp.ones((2, 4))
    (value, aux), *_ = halfstep.filter_value_and_grad(loss, has_aux=True)(params, x)
    assert aux["w"].dtype == jnp.bfloat16
    assert value.dtype == jnp.float32


def test_a_function_that_cannot_be_called_with_them_returns_float32():
    # JAX is told to promote nothing here, so that float32 times bfloat16 is an error.
    params, x = {"w": jnp.ones((4, 4), jnp.bfloat16)}, jnp.ones((2, 4))
    assert halfstep.autocast(lambda p, x: x @ p["w"], "bf16")(params, x).dtype == jnp.float32
