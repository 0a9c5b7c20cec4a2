"""Autocast of functions that bring their own derivatives or their own mapping, and of kernels."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep._autocast.transform import autocast
from tests.autocast._shared import (
    W,
    X,
    compute,
    dots,
    every_format,
    named,
)

pytestmark = pytest.mark.core


@every_format
@pytest.mark.parametrize("symbolic_zeros", [False, True])
def test_custom_jvp_with_an_integer_argument(policy: str, symbolic_zeros: bool):
    @jax.custom_jvp
    def times(x: Any, n: Any) -> Any:
        return x * n.astype(x.dtype)

    def rule(primals: Any, tangents: Any) -> Any:
        (x, n), (dx, dn) = primals, tangents
        assert dn.dtype == jax.dtypes.float0
        return times(x, n), 2 * times(dx, n)  # Twice the true derivative.

    times.defjvp(rule, symbolic_zeros=symbolic_zeros)

    def loss(w: Any, x: Any, n: Any) -> Any:
        return jnp.sum(times(x @ w, n))

    args = W, jnp.full((4, 4), 2.0), jnp.int32(3)
    func = autocast(loss, policy)
    assert func(*args) == 6 * 16
    assert (jax.grad(func, argnums=1)(*args) == 6).all()
    _, tangent = jax.jvp(lambda x: func(W, x, args[2]), (args[1],), (jnp.ones((4, 4)),))
    assert tangent == 6 * 16


@every_format
def test_custom_jvp_sees_symbolic_zeros(policy: str):
    seen = []

    @jax.custom_jvp
    def product(x: Any, y: Any) -> Any:
        return x * y

    def rule(primals: Any, tangents: Any) -> Any:
        (x, y), (dx, dy) = primals, tangents
        zeros = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
        seen.append(zeros)
        out = jnp.zeros_like(x)
        out = out if zeros[0] else out + 3 * dx * y
        return x * y, out if zeros[1] else out + 3 * x * dy

    product.defjvp(rule, symbolic_zeros=True)

    def loss(w: Any, x: Any, y: Any) -> Any:
        return jnp.sum(product(x @ w, y))

    args = W, jnp.full((4, 4), 2.0), jnp.full((4, 4), 5.0)
    assert (jax.grad(autocast(loss, policy), argnums=1)(*args) == 15).all()
    assert [False, True] in seen
    assert (jax.grad(autocast(loss, policy), argnums=2)(*args) == 6).all()
    assert [True, False] in seen


@every_format
def test_relu_and_its_friends_keep_their_derivatives(policy: str):
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.nn.relu(x @ w) + jax.nn.silu(x @ w) + jax.nn.softplus(x @ w))

    # At 0 these are what the rules say, not what the formulas give.
    x = jnp.zeros((4, 4))
    ours = jax.grad(autocast(loss, policy), argnums=1)(W, x)
    np.testing.assert_array_equal(ours, jax.grad(loss, argnums=1)(W, x))


@every_format
def test_custom_vjp_with_an_integer_argument(policy: str):
    @jax.custom_vjp
    def look_up(table: Any, index: Any) -> Any:
        return table[index]

    def forward(table: Any, index: Any) -> Any:
        return table[index], (index, table)

    def backward(residuals: Any, cotangent: Any) -> Any:
        index, table = residuals
        # Three times the true one.
        gradient = jnp.zeros_like(table).at[index].add(3 * cotangent)
        return gradient, np.zeros(index.shape, jax.dtypes.float0)

    look_up.defvjp(forward, backward)

    def loss(params: Any, index: Any) -> Any:
        return jnp.sum(look_up(params["table"], index) @ params["w"])

    params = {"table": jnp.ones((4, 4)), "w": W}
    gradient = jax.grad(autocast(loss, policy))(params, jnp.array([1, 1, 3]))
    np.testing.assert_array_equal(gradient["table"][:, 0], [0, 6, 0, 3])
    assert gradient["table"].dtype == jnp.float32


@every_format
def test_custom_vjp_with_what_is_not_differentiated(policy: str):
    calls = []

    def make(activation: Callable) -> Callable:
        def function(scale: float, x: Any) -> Any:
            return scale * activation(x)

        custom = jax.custom_vjp(function, nondiff_argnums=(0,))

        def backward(scale: float, x: Any, cotangent: Any) -> Any:
            calls.append(scale)
            return (7 * scale * cotangent,)

        custom.defvjp(lambda scale, x: (function(scale, x), x), backward)
        return custom

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(make(jnp.tanh)(2.0, x @ w))

    gradient = jax.grad(autocast(loss, policy), argnums=1)(W, X)
    assert calls == [2.0]
    np.testing.assert_array_equal(gradient, jnp.full((4, 4), 14.0))


@every_format
def test_custom_vjp_whose_residuals_are_its_inputs(policy: str):
    @jax.custom_vjp
    def dense(x: Any, w: Any) -> Any:
        return x @ w

    def backward(residuals: Any, cotangent: Any) -> Any:
        x, w = residuals
        return 2 * cotangent @ w.T, 2 * x.T @ cotangent

    dense.defvjp(lambda x, w: (x @ w, (x, w)), backward)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(dense(dense(x, w), w))

    func = autocast(loss, policy)
    gradient = jax.grad(func)(W, jnp.ones((2, 4)))
    # The second layer: 2 * x.T @ 1. The first: twice that once more.
    np.testing.assert_array_equal(gradient, jnp.full((4, 4), 4.0 + 8.0))
    assert set(dots(jax.grad(func), W, jnp.ones((2, 4)))) == {(str(compute(policy)),) * 2}


@every_format
def test_custom_vjp_that_keeps_numbers(policy: str):
    @jax.custom_vjp
    def layer(x: Any) -> Any:
        return 2 * x

    def backward(residuals: Any, cotangent: Any) -> Any:
        triples, factor, x = residuals
        return (factor * cotangent if triples else jnp.zeros_like(x),)

    layer.defvjp(lambda x: (2 * x, (True, 3.0, x)), backward)

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(layer(x @ w))

    for gradient in (jax.grad, lambda func, **options: jax.jit(jax.grad(func, **options))):
        ours = gradient(autocast(loss, policy), argnums=1)(W, X)
        np.testing.assert_array_equal(ours, jnp.full((4, 4), 3.0))


@every_format
def test_custom_rules_with_whole_numbers_as_results(policy: str):
    @jax.custom_vjp
    def largest(x: Any) -> Any:
        return jnp.max(x), jnp.argmax(x)

    largest.defvjp(lambda x: (largest(x), x), lambda x, ct: (jnp.full_like(x, 7) * ct[0],))

    @jax.custom_jvp
    def smallest(x: Any) -> Any:
        return jnp.min(x), jnp.argmin(x)

    @smallest.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        zero = np.zeros((), jax.dtypes.float0)
        return smallest(*primals), (5 * jnp.sum(tangents[0]), zero)

    def loss(w: Any, x: Any) -> Any:
        (high, last), (low, first) = largest(x @ w), smallest(x @ w)
        return high + low, (last, first)

    gradient, (last, first) = jax.grad(autocast(loss, policy), argnums=1, has_aux=True)(W, X)
    np.testing.assert_array_equal(gradient, jnp.full((4, 4), 12.0))
    assert (last, first) == (15, 0)


def test_a_rule_that_closes_over_a_traced_value():
    def loss(w: Any, x: Any) -> Any:
        scale = jnp.sum(w)

        @jax.custom_vjp
        def layer(x: Any) -> Any:
            return x * scale

        layer.defvjp(lambda x: (layer(x), None), lambda _, cotangent: (scale * cotangent,))
        return jnp.sum(layer(x))

    # As inside jit, scan and checkpoint: a rule cannot close over what is traced.
    with pytest.raises(ValueError, match="uses a value of the function that autocast rewrites"):
        jax.grad(autocast(loss), argnums=1)(W, X)


@every_format
def test_custom_vjp_beside_a_traced_value(policy: str):
    def loss(w: Any, x: Any) -> Any:
        shift = jnp.sum(w)

        @jax.custom_vjp
        def layer(x: Any) -> Any:
            return x @ x + 1

        layer.defvjp(lambda x: (layer(x), None), lambda _, cotangent: (5 * cotangent,))
        return jnp.sum(layer(x)) + shift

    gradients = jax.grad(autocast(loss, policy), argnums=(0, 1))(W, X)
    np.testing.assert_array_equal(gradients[0], jnp.ones((4, 4)))
    np.testing.assert_array_equal(gradients[1], jnp.full((4, 4), 5.0))


@every_format
def test_a_pallas_kernel_with_a_rule(policy: str):
    from jax.experimental import pallas as pl

    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] * 2

    @jax.custom_vjp
    def double(x: Any) -> Any:
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=out, interpret=True)(x)

    double.defvjp(lambda x: (double(x), None), lambda _, cotangent: (11 * cotangent,))

    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(double(x @ w) @ w)

    value, gradient = jax.value_and_grad(autocast(loss, policy), argnums=1)(W, jnp.ones((4, 4)))
    assert value == 32
    np.testing.assert_array_equal(gradient, jnp.full((4, 4), 11.0))


def test_a_rule_is_told_what_is_differentiated_and_used():
    told: list[Any] = []

    @jax.custom_vjp
    def product(x, y):
        return x @ y, jnp.sum(x)

    def forward(x, y):
        told.append((x.perturbed, y.perturbed))
        return (x.value @ y.value, jnp.sum(x.value)), (x.value, y.value)

    def backward(kept, cotangents):
        told.append(tuple(type(cotangent).__name__ == "SymbolicZero" for cotangent in cotangents))
        return cotangents[0] @ kept[1].T, kept[0].T @ cotangents[0]

    product.defvjp(forward, backward, symbolic_zeros=True)

    def func(w, x):
        return jnp.sum(jnp.sin(product(x, w)[0]))

    w, x = jnp.eye(3), jnp.ones((2, 3))
    expected = jax.grad(func)(w, x)
    without, told[:] = list(told), []
    found = jax.grad(autocast(func, "bf16"))(w, x)
    assert told == without == [(False, True), (False, True)]
    assert jnp.allclose(found, expected, rtol=2**-7)


def test_a_backward_rule_that_closes_over_an_argument_is_told_what_to_do():
    def loss(w, x):
        @jax.custom_vjp
        def total(w):
            return jnp.sum(x @ w)

        total.defvjp(lambda w: (total(w), None), lambda _, g: (g * jnp.sum(x, 0),))
        return total(w * 2)

    message = "the custom_vjp function 'total' .* Give it to the custom_vjp function as an argument"
    with pytest.raises(ValueError, match=message):
        jax.grad(autocast(loss, "bf16"))(jnp.ones(4), jnp.ones((8, 4)))


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
def test_a_function_with_its_own_mapping_is_mapped_by_its_rule(axes: tuple[int | None, int | None]):
    called: list[tuple[bool, ...]] = []

    @jax.custom_batching.custom_vmap
    def multiplied(x, w):
        return jnp.tanh(x @ w)

    @multiplied.def_vmap
    def _(size, is_mapped, x, w):
        called.append(tuple(is_mapped))
        inside = tuple(0 if mapped else None for mapped in is_mapped)
        return jax.vmap(lambda x, w: jnp.tanh(x @ w), inside, axis_size=size)(x, w), True

    func = autocast(lambda x, w: multiplied(x, w), "bf16", params=1)
    x, w = jnp.ones((4, 8)) / 3, jnp.eye(8)
    given = [
        v if axis is None else jnp.stack([v, 2 * v]) for v, axis in zip((x, w), axes, strict=True)
    ]
    found = jax.vmap(func, axes)(*given)
    assert called == [tuple(axis == 0 for axis in axes)]
    expected = jax.vmap(lambda x, w: jnp.tanh(x @ w), axes)(*given)
    assert found.dtype == jnp.float32
    assert jnp.allclose(found, expected, rtol=2**-7)
    assert not jnp.array_equal(found, expected)
    program = str(jax.make_jaxpr(jax.vmap(func, axes))(*given))
    assert "bf16" in program


def test_an_activation_with_its_own_derivative_is_recomputed_with_its_neighbors():
    @jax.custom_jvp
    def activation(x: Any) -> Any:
        return jnp.sinh(x)

    activation.defjvp(lambda xs, dxs: (activation(*xs), jnp.cosh(*xs) * dxs[0]))

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.log1p(activation(jnp.exp(x @ w))) @ w)

    x = jnp.ones((16, 4))
    assert wide_residuals(autocast(loss, "bf16"), x, W) == []
    assert wide_residuals(autocast(loss, "bf16,store:op:*=keep"), x, W) != []


def test_a_product_within_an_activation_is_not_computed_again():
    @jax.custom_jvp
    def activation(x: Any) -> Any:
        return jnp.sinh(x @ W)

    activation.defjvp(lambda xs, dxs: (activation(*xs), jnp.cosh(xs[0] @ W) * (dxs[0] @ W)))

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.log1p(activation(jnp.exp(x @ w))) @ w)

    x = jnp.ones((16, 4))
    assert dots(jax.grad(autocast(loss, "bf16")), x, W) == [("bfloat16", "bfloat16")] * len(
        dots(jax.grad(loss), x, W)
    )


def test_a_kernel_with_its_own_backward_pass_is_not_run_again():
    @jax.custom_vjp
    def kernel(x: Any) -> Any:
        return jnp.sinh(x)

    kernel.defvjp(lambda x: (jnp.sinh(x), x), lambda x, cotangent: (jnp.cosh(x) * cotangent,))

    def loss(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.log1p(kernel(jnp.exp(x @ w))) @ w)

    assert len(named(jax.grad(autocast(loss, "bf16")), "sinh", jnp.ones((16, 4)), W)) == 1


def wide_residuals(func: Callable, x: Any, *args: Any) -> list[Any]:
    """What is stored in float32 for the gradient with respect to `x`, and is as large as `x`."""
    residuals = jax.tree.leaves(jax.vjp(lambda x: func(x, *args), x)[1])
    return [r for r in residuals if r.dtype == jnp.float32 and r.shape == x.shape]


@every_format
def test_a_mapped_rule_with_a_result_that_is_not_mapped_and_has_no_gradient(policy: str):
    def scaled(x: Any, w: Any) -> Any:
        return w**2, x * w

    ruled = jax.custom_vjp(scaled)
    ruled.defvjp(lambda x, w: jax.vjp(scaled, x, w), lambda pull, cotangent: pull(cotangent))

    def loss(w: Any) -> Any:
        _, rows = jax.vmap(ruled, in_axes=(0, None), out_axes=(None, 0))(jnp.ones(3), w)
        return jnp.sum(rows)

    assert jax.grad(loss)(2.0) == jax.grad(autocast(loss, policy))(2.0) == 3
