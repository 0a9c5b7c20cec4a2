"""Autocast of loops and branches, one by one."""

from collections.abc import Callable
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

from halfstep._autocast.transform import autocast
from tests.autocast._shared import (
    W,
    X,
    compute,
    dots,
    every_format,
    half_eps,
    named,
    rounded,
    stored_as,
    with_and_without_islands,
)

pytestmark = pytest.mark.core


# Scan.


@every_format
@with_and_without_islands
def test_a_float32_zeros_carry_becomes_low_with_the_body(policy: str, islands: bool):
    def rnn(w: Any, xs: Any) -> Any:
        def turn(h: Any, x: Any) -> Any:
            h = jnp.tanh(h @ w + x @ w)
            return h, h

        return jax.lax.scan(turn, jnp.zeros((2, 4)), xs)

    xs = jnp.ones((3, 2, 4))
    func = autocast(rnn, stored_as(policy, islands))
    gradient = jax.grad(lambda w, xs: jnp.sum(func(w, xs)[1]))
    low = (str(compute(policy)),) * 2
    assert set(dots(func, W, xs)) == set(dots(gradient, W, xs)) == {low}
    carry, ys = func(W, xs)
    assert carry.dtype == ys.dtype == jnp.float32
    if islands:
        assert named(func, "scan", W, xs)[0].outvars[0].aval.dtype == compute(policy)
    exact_carry, exact_ys = rnn(W, xs)
    # In each of the 3 iterations: x, h and w as they enter, two dots, the sum, the tanh.
    tolerance = 3 * 7 * half_eps(policy)
    np.testing.assert_allclose(carry, exact_carry, rtol=tolerance)
    np.testing.assert_allclose(ys, exact_ys, rtol=tolerance)


@every_format
def test_a_loss_summed_over_turns_is_exact(policy: str):
    def loss(w: Any, xs: Any) -> Any:
        def turn(total: Any, x: Any) -> Any:
            return total + jnp.mean(x @ w), None

        return jax.lax.scan(turn, jnp.zeros(()), xs)[0]

    # 4096 ones: neither format can count that far in ones.
    assert autocast(loss, policy)(W, jnp.ones((4096, 1, 4))) == 4096


@every_format
def test_a_tree_of_sums_stays_in_float32(policy: str):
    def loss(w: Any, xs: Any) -> Any:
        def turn(carry: Any, x: Any) -> Any:
            y = x @ w
            sums = {"all": carry["all"] + y, "first": carry["first"] - y[0, 0]}
            return {**sums, "last": y}, None

        init = {"all": jnp.zeros((1, 4)), "first": jnp.zeros(()), "last": jnp.zeros((1, 4))}
        return jax.lax.scan(turn, init, xs)[0]

    out = autocast(loss, policy)(W, jnp.ones((4096, 1, 4)))
    assert (out["all"] == 4096).all()
    assert out["first"] == -4096
    assert (out["last"] == 1).all()


@every_format
@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradient_of_a_weight_shared_by_4096_turns(policy: str, reverse: bool):
    def loss(w: Any, xs: Any) -> Any:
        def turn(carry: Any, x: Any) -> Any:
            return carry, jnp.sum(x @ w)

        return jnp.sum(jax.lax.scan(turn, 0, xs, reverse=reverse)[1])

    gradient = jax.grad(autocast(loss, policy))
    assert (gradient(W, jnp.ones((4096, 1, 4))) == 4096).all()
    assert set(dots(gradient, W, jnp.ones((4096, 1, 4)))) == {(str(compute(policy)),) * 2}


@every_format
def test_the_gradient_of_a_bias_shared_by_4096_turns(policy: str):
    def loss(params: Any, xs: Any) -> Any:
        def turn(carry: Any, x: Any) -> Any:
            return carry, jnp.sum(x @ params["w"] + params["b"])

        return jnp.sum(jax.lax.scan(turn, 0, xs)[1])

    gradient = jax.grad(autocast(loss, policy))(
        {"w": W, "b": jnp.ones((1, 4))}, jnp.ones((4096, 1, 4))
    )
    assert (gradient["b"] == 4096).all()


@every_format
def test_layers_as_xs(policy: str):
    def loss(layers: Any, x: Any) -> Any:
        def layer(x: Any, params: Any) -> Any:
            return jnp.tanh(x @ params["w"] + params["b"]), jnp.sum(x)

        x, sums = jax.lax.scan(layer, x, layers)
        return jnp.mean(x**2) + jnp.mean(sums)

    layers = {"w": jnp.stack([W] * 3), "b": jnp.zeros((3, 1, 4))}
    func = autocast(loss, policy)
    gradients = jax.grad(func)(layers, X)
    expected = jax.grad(loss)(layers, X)
    assert set(dots(jax.grad(func), layers, X)) == {(str(compute(policy)),) * 2}
    for ours, exact in zip(jtu.tree_leaves(gradients), jtu.tree_leaves(expected), strict=True):
        assert ours.dtype == jnp.float32
        # Per layer 5 roundings forward and 10 backward, 3 layers.
        error = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
        assert error <= 3 * 15 * half_eps(policy)


@every_format
def test_parameters_as_a_carry(policy: str):
    def train(w: Any, xs: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return jnp.sum((x @ w) ** 2) / 2

        def step(w: Any, x: Any) -> Any:
            return w - 2.0**-14 * jax.grad(loss)(w, x), None

        return jax.lax.scan(step, w, xs)[0]

    # Steps of 2**-14 that 16 bits beside a 1 would lose are kept: the carry is a sum.
    xs = jnp.broadcast_to(jnp.eye(4), (8, 4, 4))
    exact = train(W, xs)
    assert exact[0, 0] != 1
    ours = autocast(train, policy)(W, xs)
    # What is added is rounded a few times, relative to itself.
    np.testing.assert_allclose(1 - ours[0, 0], 1 - exact[0, 0], rtol=8 * half_eps(policy))


@every_format
def test_a_scan_with_a_length_and_no_xs(policy: str):
    def func(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, _: (h @ w, jnp.sum(h)), x, None, length=4)

    carry, ys = autocast(func, policy)(W, X)
    np.testing.assert_array_equal(carry, rounded(X, policy))
    assert ys.shape == (4,)
    assert ys.dtype == jnp.float32


@every_format
def test_a_reverse_unrolled_scan(policy: str):
    def func(w: Any, xs: Any) -> Any:
        return jax.lax.scan(
            lambda h, x: ((h + x) @ w, h), jnp.zeros((1, 2)), xs, reverse=True, unroll=2
        )

    w, xs = jnp.eye(2), jnp.arange(8.0).reshape(4, 1, 2)
    ours, exact = autocast(func, policy)(w, xs), func(w, xs)
    for a, b in zip(ours, exact, strict=True):  # Small integers: exact.
        np.testing.assert_array_equal(a, b)
    equation = named(autocast(func, policy), "scan", w, xs)[0]
    assert equation.params["reverse"]
    assert equation.params["unroll"] == 2


# While, cond and switch.


@every_format
def test_while_with_carries_of_many_kinds(policy: str):
    def func(w: Any, x: Any) -> Any:
        def turn(carry: Any) -> Any:
            count, h, total, flag, half = carry
            h = h @ w
            return count + 1, h, total + jnp.sum(h), ~flag, half + half

        start = jnp.int32(0), x, jnp.zeros(()), jnp.array(True), jnp.ones((), jnp.bfloat16)
        return jax.lax.while_loop(lambda carry: carry[0] < 4, turn, start)

    args = W, jnp.ones((4, 4))
    count, h, total, flag, half = autocast(func, policy)(*args)
    assert (count, total, flag, half) == (4, 64, True, 16)
    assert count.dtype == jnp.int32
    assert h.dtype == total.dtype == jnp.float32
    assert half.dtype == jnp.bfloat16
    assert dots(autocast(func, policy), *args) == [(str(compute(policy)),) * 2]


@every_format
def test_while_that_ends_by_a_float(policy: str):
    def func(w: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda h: jnp.sum(h) > 1.5, lambda h: (h @ w) / 2, x)

    args = W, jnp.ones((4, 4))
    np.testing.assert_array_equal(autocast(func, policy)(*args), func(*args))


@every_format
def test_while_counts_to_4096_in_float32(policy: str):
    def func(w: Any, x: Any) -> Any:
        def turn(carry: Any) -> Any:
            i, total = carry
            return i + 1, total + jnp.sum(x @ w)

        return jax.lax.while_loop(lambda c: c[0] < 4096, turn, (0, jnp.zeros(())))[1]

    assert autocast(func, policy)(W, jnp.ones((1, 4)) / 4) == 4096


@every_format
def test_branches_of_different_kinds(policy: str):
    branches: list[Callable] = [
        lambda w, x: x @ w,
        lambda w, x: jnp.zeros_like(x),
        lambda w, x: jnp.exp(x),
        lambda w, x: x,
        lambda w, x: w,
    ]

    def func(w: Any, x: Any, i: Any) -> Any:
        return jax.lax.switch(i, branches, w, x)

    for i, branch in enumerate(branches):
        ours = autocast(func, policy)(W, X, jnp.int32(i))
        assert ours.dtype == jnp.float32
        # x on its way in and the result.
        np.testing.assert_allclose(ours, branch(W, X), rtol=2 * half_eps(policy))
        gradient = jax.grad(lambda *a: jnp.sum(autocast(func, policy)(*a)), argnums=1)
        exact = jax.grad(lambda x, branch=branch: jnp.sum(branch(W, x)))(X)
        np.testing.assert_allclose(gradient(W, X, jnp.int32(i)), exact, rtol=3 * half_eps(policy))


@every_format
def test_cond_with_one_branch_of_zeros_in_a_scan(policy: str):
    def func(w: Any, xs: Any) -> Any:
        def turn(h: Any, x: Any) -> Any:
            h = jax.lax.cond(x[0, 0] > 0, lambda h: h @ w, lambda h: jnp.zeros((1, 4)), h + x)
            return h, h

        return jax.lax.scan(turn, jnp.zeros((1, 4)), xs)[1]

    xs = jnp.array([1.0, 2.0, -1.0, 3.0])[:, None, None] * jnp.ones((1, 1, 4))
    np.testing.assert_array_equal(autocast(func, policy)(W, xs), func(W, xs))


@pytest.mark.rows(1)
@pytest.mark.usefixtures("standard_promotion")
@every_format
def test_a_checkpointed_while_loop(policy: str):
    def loss(w: Any, x: Any) -> Any:
        _, h = eqxi.while_loop(
            lambda carry: carry[0] < 3,
            lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ w)),
            (0, x),
            kind="checkpointed",
            max_steps=8,
        )
        return jnp.sum(h)

    ours, exact = (jax.grad(func)(W, X) for func in (autocast(loss, policy), loss))
    # In each of the 3 iterations: x, w, the dot and the tanh; backward twice as many.
    assert np.linalg.norm(ours - exact) <= 3 * 3 * 4 * half_eps(policy) * np.linalg.norm(exact)
