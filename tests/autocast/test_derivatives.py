"""Derivatives as JAX gives them, in every form, of and in functions under autocast.

All numbers are small integers, which both formats hold exactly, as they hold their products
and sums: so every form gives what it gives of the plain function, to the last bit.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import halfstep

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]

W = jnp.asarray(np.arange(16).reshape(4, 4) % 5 - 2, jnp.float32)
X = jnp.asarray(np.arange(12).reshape(3, 4) % 3 - 1, jnp.float32)


def squares(w: Any, x: Any) -> Any:
    return jnp.sum((x @ w) ** 2)


def product(w: Any, x: Any) -> Any:
    return x @ w


# Functions with rules of their own, whose derivatives are not the true ones.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def _times(n: int, x: Any, func: Callable) -> Any:
    return func(x) * n


_times.defvjp(lambda n, x, func: (_times(n, x, func), x), lambda n, func, x, ct: (ct * n * 2,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _applied(x: Any, func: Callable) -> Any:
    return func(x)


@_applied.defjvp
def _(func: Callable, primals: Any, tangents: Any) -> Any:
    return _applied(primals[0], func), tangents[0] * 3


@jax.custom_jvp
def _square(x: Any) -> Any:
    return x * x


@jax.custom_jvp
def _slope(x: Any) -> Any:
    return 2 * x


@_slope.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _slope(primals[0]), 3 * tangents[0]


@_square.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return _square(primals[0]), _slope(primals[0]) * tangents[0]


@jax.custom_gradient
def _cubed(x: Any) -> Any:
    return x * x, lambda ct: (ct * 3 * x,)


def _root(w: Any, x: Any) -> Any:
    return lax.custom_root(
        lambda z: z - x[0] @ w,
        jnp.zeros(4),
        lambda func, start: start - func(start),
        lambda func, y: y / func(jnp.ones_like(y)),
    )


def _converted(w: Any, x: Any) -> Any:
    func, consts = jax.closure_convert(lambda v: v @ w, x)
    return func(x, *consts)


def _checkpointed(policy: Any, w: Any, x: Any) -> Any:
    return jax.checkpoint(lambda x: (x @ w) ** 2, policy=policy)(x)


def _scanned(w: Any, x: Any) -> Any:
    return lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0]


def _summed_rows(w: Any, x: Any) -> Any:
    return lax.scan(lambda total, row: (total + row @ w, row @ w), jnp.zeros(4), x)


def total(func: Callable) -> Callable:
    return lambda w, x: jnp.sum(func(w, x))


INSIDE = {
    "custom_vjp with what is not differentiated": lambda w, x: _times(3, x @ w, lambda v: v * v),
    "custom_jvp with what is not differentiated": lambda w, x: _applied(x @ w, lambda v: v * v),
    "custom_jvp of custom_jvp": lambda w, x: _square(x @ w),
    "custom_gradient": lambda w, x: _cubed(x @ w),
    "custom_root": _root,
    "closure_convert": _converted,
    "checkpoint, nothing": functools.partial(
        _checkpointed, jax.checkpoint_policies.nothing_saveable
    ),
    "checkpoint, dots": functools.partial(_checkpointed, jax.checkpoint_policies.dots_saveable),
    "linear_transpose": lambda w, x: jax.linear_transpose(lambda v: v @ w, x)(x @ w)[0],
    "linearize": lambda w, x: jax.linearize(lambda v: (v @ w) ** 2, x)[1](x),
    "jvp": lambda w, x: jax.jvp(lambda v: (v @ w) ** 2, (x,), (x,))[1],
    "hessian": lambda w, x: jax.hessian(lambda v: jnp.sum((v @ w) ** 2))(x[0]),
    "grad of each row": lambda w, x: jax.vmap(jax.grad(lambda v: jnp.sum((v @ w) ** 2)))(x),
}


def _of_hvp(func: Callable) -> Callable:
    return lambda w, x: jax.jvp(jax.grad(lambda w: func(w, x)), (w,), (w,))[1]


def _linearized(func: Callable) -> Callable:
    return lambda w, x: jax.linearize(func, w, x)[1](w, x)


def _transposed(ct: Any) -> Callable:
    return lambda func: lambda w, x: jax.linear_transpose(lambda w: func(w, x), w)(ct)


ONES = jnp.ones((3, 4))
OF = {
    **{f"grad of {name}": (total(func), jax.grad) for name, func in INSIDE.items()},
    "hessian": (squares, jax.hessian),
    "hessian of custom_jvp of custom_jvp": (total(lambda w, x: _square(x @ w)), jax.hessian),
    "hessian of scan": (total(_scanned), jax.hessian),
    "reverse over reverse": (squares, lambda func: jax.jacrev(jax.jacrev(func))),
    "reverse over forward": (squares, lambda func: jax.jacrev(jax.jacfwd(func))),
    "forward over forward": (squares, lambda func: jax.jacfwd(jax.jacfwd(func))),
    "product with a hessian": (squares, _of_hvp),
    "linearize": (squares, _linearized),
    "linearize a product": (product, _linearized),
    "vjp": (product, lambda func: lambda w, x: jax.vjp(func, w, x)[1](ONES)),
    "jacobian, forward": (product, jax.jacfwd),
    "jacobian, reverse": (product, jax.jacrev),
    "linear_transpose": (product, _transposed(ONES)),
    "linear_transpose of two products": (
        lambda w, x: x @ w @ jnp.eye(4) + x @ w,
        _transposed(ONES),
    ),
    "linear_transpose of scan": (_summed_rows, _transposed((jnp.ones(4), ONES))),
    "linear_transpose of a sum": (lambda w, x: jnp.sum(x @ w) * 2, _transposed(1.0)),
}


@pytest.mark.rows(15)
@pytest.mark.parametrize("policy", ["bf16", "f16"])
@pytest.mark.parametrize(("func", "form"), OF.values(), ids=OF)
def test_as_of_the_plain_function(func: Callable, form: Callable, policy: str):
    exact = form(func)(W, X)
    found = form(halfstep.autocast(func, policy))(W, X)
    assert jax.tree.structure(found) == jax.tree.structure(exact)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert (ours.dtype, ours.weak_type) == (theirs.dtype, theirs.weak_type)
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("policy", ["bf16", "f16", "f8"])
def test_results_are_weakly_typed_where_they_were(policy: str):
    def func(w: Any, x: Any, factor: Any) -> Any:
        scaled = jnp.sum(x @ w * 2)
        return (
            scaled,
            factor * 2,
            2.0 * jnp.ones(()),
            1.0,
            lax.cond(factor > 0, lambda: 1.0, lambda: 2.0),
        )

    args = (W, X, 3.0)
    exact = jax.eval_shape(func, *args)
    found = jax.eval_shape(halfstep.autocast(func, policy), *args)
    assert [(leaf.dtype, leaf.weak_type) for leaf in found] == [
        (leaf.dtype, leaf.weak_type) for leaf in exact
    ]
