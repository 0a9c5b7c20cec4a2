"""Inputs at the edge: donated, empty, and not finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import halfstep

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]
every_format = pytest.mark.parametrize("policy", ["bf16", "f16"])
WIDTH = 8


def params() -> Any:
    rng = np.random.default_rng(0)

    def matrix() -> Any:
        return jnp.asarray(rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)

    return {"w": matrix(), "b": 0.1 * matrix()[0], "o": matrix()}


def batch(rows: int = 6) -> Any:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.standard_normal((rows, WIDTH)), jnp.float32)


def dense(p: Any, x: Any) -> Any:
    """Layers, with a softmax between them."""
    return jax.nn.softmax(x @ p["w"] + p["b"]) @ p["o"]


def averaged(p: Any, x: Any) -> Any:
    """A running average over rows, which a row that is not finite spoils for those after it."""

    def step(h: Any, row: Any) -> Any:
        h = 0.9 * h + 0.1 * (row @ p["w"])
        return h, h

    return lax.scan(step, jnp.zeros(WIDTH), x)[1] @ p["o"]


def selected(p: Any, x: Any) -> Any:
    """Rows that are not finite are left out, as a mask of padding leaves them out."""
    finite = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
    return jnp.where(finite, jnp.tanh(jnp.where(finite, x, 0.0) @ p["w"]), 0.0) @ p["o"]


def guarded(p: Any, x: Any) -> Any:
    """Steps of a loop that are not finite are left out; their gradients are not."""

    def step(h: Any, row: Any) -> Any:
        new = h + row @ p["w"]
        return jnp.where(jnp.all(jnp.isfinite(new)), new, h), h

    return lax.scan(step, jnp.zeros(WIDTH), x)[1] @ p["o"]


NETS = {made.__name__: made for made in (dense, averaged, selected, guarded)}
BAD = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def loss_of(net: Any) -> Any:
    def loss(p: Any, x: Any) -> Any:
        out = net(p, x)
        return jnp.mean(out**2), out

    return loss


def where_finite(tree: Any) -> Any:
    return [np.isfinite(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)]


@pytest.mark.rows(4)
@every_format
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", NETS)
def test_the_same_is_not_finite(name: str, bad: str, policy: str) -> None:
    loss = loss_of(NETS[name])
    x = batch().at[3, 2].set(BAD[bad])
    (_, plain), plain_gradient = jax.value_and_grad(loss, has_aux=True)(params(), x)
    scaling = halfstep.StaticLossScaling(256.0)
    transformed = halfstep.filter_value_and_grad(loss, scaling, policy=policy, has_aux=True)
    (_, out), _, finite, gradient = jax.jit(transformed)(params(), x)
    for mine, theirs in zip(
        where_finite((out, gradient)), where_finite((plain, plain_gradient)), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    assert bool(finite) == all(map(np.all, where_finite(plain_gradient)))
    # The test compares something: a product with a row that is left out later is not finite.
    assert bool(finite) == (name == "selected")
    assert np.any(np.isfinite(out))


@every_format
@pytest.mark.parametrize("name", NETS)
def test_a_batch_without_rows(name: str, policy: str) -> None:
    def loss(p: Any, x: Any) -> Any:
        out = NETS[name](p, x)
        return jnp.sum(out**2), out

    gradient = jax.jit(jax.value_and_grad(halfstep.autocast(loss, policy), (0, 1), has_aux=True))
    (value, out), (of_params, of_x) = gradient(params(), batch(0))
    assert value == 0
    assert out.shape == of_x.shape == (0, WIDTH)
    assert out.dtype == of_x.dtype == np.float32
    for leaf, given in zip(jax.tree.leaves(of_params), jax.tree.leaves(params()), strict=True):
        assert (leaf.shape, leaf.dtype) == (given.shape, given.dtype)
        assert not np.any(leaf)


@every_format
def test_a_contraction_of_nothing(policy: str) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum((x @ w + 1.0) ** 2)

    value, gradient = jax.value_and_grad(halfstep.autocast(loss, policy))(
        jnp.zeros((0, WIDTH)), jnp.zeros((3, 0))
    )
    assert value == 3 * WIDTH
    assert gradient.shape == (0, WIDTH)


@every_format
@pytest.mark.parametrize("name", ["dense", "averaged"])
def test_donated_parameters(name: str, policy: str) -> None:
    loss = loss_of(NETS[name])

    def step(p: Any, x: Any) -> Any:
        transformed = halfstep.filter_value_and_grad(
            loss, halfstep.StaticLossScaling(256.0), policy=policy, has_aux=True
        )
        (value, _), _, _, gradient = transformed(p, x)
        return jax.tree.map(lambda leaf, g: leaf - 0.1 * g, p, gradient), value

    kept, donated = params(), params()
    kept_step, donating = jax.jit(step), jax.jit(step, donate_argnums=0)
    for _ in range(3):
        given = donated
        kept, value = kept_step(kept, batch())
        donated, again = donating(donated, batch())
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        assert value == again
    jax.tree.map(functools.partial(np.testing.assert_array_equal), kept, donated)
