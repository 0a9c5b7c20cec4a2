"""What is kept for the backward pass in 8 bits: the forward pass stays, gradients err a little."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import Policy
from halfstep._autocast.stored.float8 import keep, restore
from halfstep._policy.recipe import Factor
from tests.f8.test_frameworks import cosine, flat
from tests.models.transformers import CASES, data

ROWS = {element: Factor(element=element, per="row") for element in ("e4m3", "e5m2")}


@pytest.mark.parametrize("element", ROWS)
def test_every_number_comes_back(element: str):
    # Rows of one magnitude each, of both signs, over the range of bfloat16.
    value = jnp.linspace(0.5, 1, 64)[None] * 2.0 ** jnp.arange(-100.0, 100.0)[:, None]
    value = jnp.concatenate([value, -value]).astype(jnp.bfloat16)
    kept = jax.jit(keep, static_argnums=1)(value, ROWS[element])
    assert kept.elements.dtype == ROWS[element].dtype
    back = jax.jit(restore, static_argnums=1)(kept, np.dtype(jnp.bfloat16))
    half_step = float(jnp.finfo(ROWS[element].dtype).eps) / 2
    error = jnp.abs(back - value).astype(jnp.float32)
    assert (error <= half_step * jnp.abs(value.astype(jnp.float32))).all()


@pytest.mark.parametrize("element", ROWS)
def test_what_is_infinite_stays_so(element: str):
    value = jnp.ones((32, 64), jnp.bfloat16).at[0, :8].set(-jnp.inf).at[1, 3].set(jnp.inf)
    back = restore(keep(value, ROWS[element]), np.dtype(jnp.bfloat16))
    np.testing.assert_array_equal(back.astype(jnp.float32), value.astype(jnp.float32))
    unknown = restore(keep(value.at[2, 5].set(jnp.nan), ROWS[element]), np.dtype(jnp.bfloat16))
    assert jnp.isnan(unknown[2, 5])
    np.testing.assert_array_equal(unknown[3:].astype(jnp.float32), value[3:].astype(jnp.float32))


def test_what_is_small_or_wide_is_kept_as_it_is():
    for value in (jnp.ones((4, 16), jnp.bfloat16), jnp.ones((64, 64)), jnp.ones(4096, jnp.int16)):
        assert keep(value, ROWS["e4m3"]) is value


def test_a_convolution_without_output_has_a_gradient():
    def loss(kernel: jax.Array, x: jax.Array) -> jax.Array:
        # The kernel, dilated, is wider than what it moves over.
        names = ("NWC", "WIO", "NWC")
        made = jax.lax.conv_general_dilated(
            x, kernel, (1,), "VALID", rhs_dilation=(2,), dimension_numbers=names
        )
        return jnp.sum(made)

    kernel, x = jnp.ones((3, 4, 2)), jnp.ones((2, 4, 4))
    low = halfstep.autocast(loss, Policy(compute="bf16", residuals="e4m3"))
    np.testing.assert_array_equal(jax.grad(low)(kernel, x), np.zeros_like(kernel))


def bytes_kept(loss: Any, params: Any, x: Any, policy: str) -> dict[str, int]:
    low = halfstep.autocast(loss, policy)
    _, pull = jax.vjp(jax.jit(lambda params: low(params, x)), params)
    sizes: dict[str, int] = {}
    for leaf in jax.tree.leaves(pull):
        sizes[leaf.dtype.name] = sizes.get(leaf.dtype.name, 0) + leaf.nbytes
    return sizes


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "f8-e4m3"])
def test_half_the_bytes_and_nearly_the_gradient(recipe: str):
    made = CASES["linen"]()
    policy = f"{recipe},residuals=e4m3"
    exact = flat(jax.jit(jax.grad(made.loss))(made.params, data()))
    values, cosines = [], []
    for name in (recipe, policy):
        run = jax.jit(jax.value_and_grad(halfstep.autocast(made.loss, name)))
        value, grads = run(made.params, data())
        values.append(value)
        cosines.append(cosine(flat(grads), exact))
    # The forward pass is the same, bit for bit.
    assert values[0] == values[1]
    # A row's e4m3 alone, or beside the three legs of a recipe.
    assert cosines[1] >= (0.9985 if recipe == "bf16" else 0.9955)


def test_half_the_bytes():
    def loss(params: Any, x: Any) -> Any:
        hidden = jax.nn.softmax(jnp.where(x > 0, x @ params["up"], -jnp.inf))
        return jnp.mean((hidden @ params["down"]) ** 2)

    params = {"up": jnp.ones((64, 64)) / 8, "down": jnp.ones((64, 64)) / 8}
    x = jax.random.normal(jax.random.key(0), (128, 64))
    before, after = (bytes_kept(loss, params, x, p) for p in ("bf16", "bf16,residuals=e4m3"))
    # The factors of products are made again from their results, which are in 8 bits.
    assert after["float8_e4m3fn"] == 2 * 128 * 64
    assert after["float8_e4m3fn"] + after["bfloat16"] < 0.2 * before["bfloat16"]
    grads = jax.jit(jax.grad(halfstep.autocast(loss, "bf16,residuals=e4m3")))(params, x)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_in_a_policy():
    policy = Policy.parse("f8,residuals=e5m2")
    assert policy.residuals == "e5m2"
    assert str(policy) == "p=f32,c=bf16,o=f32,recipe=f8,residuals=e5m2"
    assert Policy.parse(str(policy)) == policy
    with pytest.raises(ValueError, match="for autocast to 16 bits"):
        Policy.parse("f32,residuals=e4m3")


def test_under_vmap():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    gradient = jax.grad(halfstep.autocast(loss, "bf16,residuals=e4m3"))
    keys = jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(keys[0], (16, 8)), jax.random.normal(keys[1], (4, 8, 16))
    many = jax.jit(jax.vmap(gradient, (None, 0)))(w, x)
    one = jax.jit(gradient)
    np.testing.assert_array_equal(many, jnp.stack([one(w, x[i]) for i in range(4)]))
