"""Contractions with a derivative of their own: every way to differentiate and to map them.

All numbers are small integers, so that every product and sum is exact in all of the formats.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep._autocast.contract import contract

pytestmark = pytest.mark.core

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)
# Contracted dimensions, then shared ones; and the shapes of the two factors.
DIMENSIONS = {
    "matrices": ((((1,), (0,)), ((), ())), (2, 3), (3, 4)),
    "shared": ((((2,), (1,)), ((0,), (0,))), (2, 3, 4), (2, 4, 3)),
    "turned": ((((0, 2), (2, 0)), ((1,), (1,))), (3, 2, 4), (4, 2, 3)),
}
every_product = pytest.mark.parametrize("name", DIMENSIONS)


def integers(seed: int, *shape: int) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), shape, -3, 4).astype(jnp.float32)


def contracted(primitive: Any, params: Any, left: Any, right: Any) -> Any:
    """In bfloat16; results in float32, and gradients in the dtypes of the factors."""
    gradients = [np.dtype(left.dtype), np.dtype(right.dtype)]
    return contract(primitive, params, (left, right), compute=BF16, out=F32, gradients=gradients)


def product(dimensions: Any, *, own: bool) -> Any:
    """The contraction that is tested, or JAX's own in float32."""

    def own_derivative(left: Any, right: Any) -> Any:
        params = {"dimension_numbers": dimensions, "precision": None, "out_sharding": None}
        return contracted(jax.lax.dot_general_p, params, left, right)

    def plain(left: Any, right: Any) -> Any:
        return jax.lax.dot_general(left.astype(F32), right.astype(F32), dimensions)

    return own_derivative if own else plain


def both(name: str, run: Any) -> tuple[Any, Any]:
    """What is computed with the contraction and with JAX's own, in one program."""
    dimensions, *_ = DIMENSIONS[name]
    return jax.jit(lambda: tuple(run(product(dimensions, own=own)) for own in (True, False)))()


def same(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.rows(4)
@every_product
@pytest.mark.parametrize("narrow", [(), (0,), (1,)], ids=["wide", "left", "right"])
def test_derivatives_of_the_first_and_second_order(name: str, narrow: tuple[int, ...]):
    """Forward, reverse, and each over each; also where one factor has 16 bits itself."""
    _, left_shape, right_shape = DIMENSIONS[name]
    factors = [integers(0, *left_shape), integers(1, *right_shape)]
    for place in narrow:
        factors[place] = factors[place].astype(BF16)
    moves = [integers(7, *left_shape), integers(8, *right_shape)]
    moves = [move.astype(factor.dtype) for move, factor in zip(moves, factors, strict=True)]

    def run(multiply: Any) -> Any:
        def loss(left: Any, right: Any) -> Any:
            return 3 * jnp.sum(multiply(left, right))

        gradient = jax.grad(loss, argnums=(0, 1))

        def slope(left: Any, right: Any) -> Any:
            return jax.jvp(loss, (left, right), tuple(moves))[1]

        def length(left: Any, right: Any) -> Any:
            return sum(jnp.sum(one.astype(F32) ** 2) for one in gradient(left, right))

        forward_over_reverse = jax.jvp(gradient, tuple(factors), tuple(moves))
        return (
            gradient(*factors),
            slope(*factors),
            forward_over_reverse,
            jax.grad(slope, argnums=(0, 1))(*factors),
            jax.grad(length, argnums=(0, 1))(*factors),
            jax.jvp(slope, tuple(factors), tuple(moves)),
        )

    found, wanted = both(name, run)
    same(found, wanted)
    assert [one.dtype for one in found[0]] == [factor.dtype for factor in factors]
    assert [one.dtype for one in found[4]] == [factor.dtype for factor in factors]


@pytest.mark.rows(2)
@every_product
def test_mapped(name: str):
    """Over either factor or both, at every position, forward and in reverse."""
    _, left_shape, right_shape = DIMENSIONS[name]
    lefts = [None, *range(len(left_shape) + 1)]
    rights = [None, *range(len(right_shape) + 1)]
    # Each position once, with all kinds of the other.
    pairs = [*itertools.zip_longest(lefts, reversed(rights), fillvalue=0), (1, None), (None, 1)]
    for left_axis, right_axis in pairs:
        if left_axis is None and right_axis is None:
            continue
        shapes = [
            shape if axis is None else (*shape[:axis], 2, *shape[axis:])
            for shape, axis in ((left_shape, left_axis), (right_shape, right_axis))
        ]
        factors = [integers(3, *shapes[0]), integers(4, *shapes[1])]

        def run(multiply: Any, axes: Any = (left_axis, right_axis), factors: Any = factors) -> Any:
            def loss(left: Any, right: Any) -> Any:
                return jnp.sum(multiply(left, right) ** 2)

            def moved(left: Any, right: Any) -> Any:
                return jax.jvp(multiply, (left, right), (left + 1, right - 1))

            def whole(left: Any, right: Any) -> Any:
                return jnp.sum(jax.vmap(multiply, in_axes=axes)(left, right) ** 2)

            return (
                jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=axes)(*factors),
                jax.vmap(moved, in_axes=axes)(*factors),
                jax.grad(whole, argnums=(0, 1))(*factors),
            )

        found, wanted = both(name, run)
        same(found, wanted)


def test_what_does_not_move():
    def run(multiply: Any) -> Any:
        left, right = integers(5, 2, 3), integers(6, 3, 4)
        # Neither of them.
        still = jax.jvp(lambda scale: scale * multiply(left, right), (2.0,), (1.0,))
        # One of them, mapped twice.
        twice = jax.vmap(
            jax.vmap(lambda v: jax.grad(lambda w: jnp.sum(multiply(w, v)))(left), in_axes=1),
            in_axes=1,
        )(jnp.stack([jnp.stack([right, 2 * right], axis=1)] * 2, axis=1))
        return still, twice

    same(*both("matrices", run))


def test_contractions_of_other_kinds_are_mapped():
    """Convolutions are mapped as themselves."""
    image, kernel = integers(9, 3, 1, 2, 6), integers(10, 2, 2, 3)

    def run(own: bool) -> Any:
        def convolve(x: Any, w: Any) -> Any:
            made = jax.make_jaxpr(lambda x, w: jax.lax.conv(x, w, (1,), "SAME"))(x, w)
            params = made.eqns[-1].params
            if not own:
                return jax.lax.conv_general_dilated_p.bind(x, w, **params)
            return contracted(jax.lax.conv_general_dilated_p, params, x, w)

        def loss(w: Any, x: Any) -> Any:
            return jnp.sum(convolve(x, w) ** 2)

        return jax.vmap(jax.grad(loss), in_axes=(None, 0))(kernel, image)

    same(run(own=True), run(own=False))
