"""The update of one block, which every kernel and the reference run; and the shapes of blocks."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from halfstep.kernels.flash_update._rule import (
    HasType,
    Leaf,
    Moments,
    Scalars,
    Spec,
    hashed,
    leaf_of,
    updated,
)
from halfstep.quant._codes import Code, scale_of
from halfstep.quant._groups import SIZE, Groups
from halfstep.quant._split import joined, parted, widened

SCALES = tuple(i for i, name in enumerate(Leaf._fields) if name.endswith("scale"))
"""The indices of the fields of a leaf that are scales."""


def refusal(leaf: Leaf, grad: HasType, spec: Spec) -> str | None:
    """Return why no kernel takes a leaf, or `None` if nothing common to all kernels forbids it."""
    if leaf.param.size == 0:
        return f"takes no empty leaf; got shape {list(leaf.param.shape)}"
    if (spec.first_code, spec.second_code, spec.groups.size) != ("int8", "root8", SIZE):
        return (
            f"takes moments in int8 and root8, in groups of {SIZE}; got {spec.first_code}, "
            f"{spec.second_code} and {spec.groups.size}"
        )
    widths = [array.dtype.itemsize for array in (leaf.param, grad)]
    if max(widths) > 4:
        return f"takes parameters and gradients of 16 or 32 bits; got {8 * max(widths)}"
    return None


class View(NamedTuple):
    """A leaf as a kernel sees it: in three dimensions, with groups along one of the last two."""

    shape: tuple[int, int, int]
    groups: Groups

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """The shape of the leaf's scales."""
        return self.groups.scale_shape(self.shape)

    @property
    def is_ragged(self) -> bool:
        """Whether the last group is not full."""
        return self.shape[self.groups.axis] % self.groups.size != 0

    def scale_block(self, block: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scales that belong to a block."""
        rows, cols = block
        size = self.groups.size
        return (rows // size, cols) if self.groups.axis == -2 else (rows, cols // size)

    def arrays(self, leaf: Leaf) -> list[jax.Array]:
        """Return the arrays of a leaf, in the shapes of the view."""
        shapes = [self.scale_shape if i in SCALES else self.shape for i in leaf.present]
        return [leaf[i].reshape(shape) for i, shape in zip(leaf.present, shapes, strict=True)]

    def position(
        self, block: tuple[int, int], start: tuple[ArrayLike, ArrayLike, ArrayLike]
    ) -> jax.Array:
        """Return the position of each element in the whole leaf, which gives its random words."""
        _, rows, cols = self.shape
        full = self.groups.count(self.shape) * self.groups.size
        rows, cols = (full, cols) if self.groups.axis == -2 else (rows, full)
        lead, row, col = (jnp.asarray(i, jnp.int32) for i in start)
        at = (lead * rows + row + jax.lax.broadcasted_iota(jnp.int32, block, 0)) * cols
        return (at + col + jax.lax.broadcasted_iota(jnp.int32, block, 1)).astype(jnp.uint32)


def view_of(shape: tuple[int, ...], groups: Groups) -> View:
    """View a leaf in three dimensions, without moving it in row-major memory."""
    if groups.axis == -1:
        return View((1, math.prod(shape[:-1]), shape[-1]), groups)
    axis = len(shape) + groups.axis
    lead, rows, cols = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if rows % groups.size == 0:
        # With full groups, leading axes and rows merge into one long axis, so that blocks can have
        # more rows.
        lead, rows = 1, lead * rows
    return View((lead, rows, cols), Groups(-2, groups.size))


def update_block(
    leaf: Leaf,
    grad: jax.Array,
    by: Scalars,
    spec: Spec,
    groups: Groups,
    *,
    at: jax.Array | None,
    nearest: Callable[[jax.Array], jax.Array] = jnp.round,
) -> Leaf:
    """Step one block. A last group that is not full is padded during the computation.

    Args:
        leaf: The block's part of every array.
        grad: The block's part of the gradient.
        by: The hyperparameters.
        spec: The optimizer, and how its state is stored.
        groups: How the block is divided into groups.
        at: The positions of the block's elements in the whole leaf, for random rounding.
        nearest: Rounds to the nearest.
    """
    shape = leaf.param.shape

    words = chances = None
    if spec.stochastic and at is not None:
        at = groups.divided(at)
        words = hashed(at, by.seed, stream=0)
        # Convert by way of int32, which every backend converts to floats. The shift has cleared the
        # sign.
        top = jax.lax.bitcast_convert_type(hashed(at, by.seed, stream=1) >> 8, jnp.int32)
        chances = top.astype(jnp.float32) * 2.0**-24
    root = _decoded(leaf.second, leaf.second_scale, spec.second, groups)
    old = Moments(
        joined(groups.divided(leaf.param), None if leaf.low is None else groups.divided(leaf.low)),
        _decoded(leaf.first, leaf.first_scale, spec.first, groups),
        None if root is None else root * root,
    )
    new = updated(old, widened(groups.divided(grad)), by, spec)
    param, low = parted(new.value, leaf.param, leaf.low, words)
    made = Leaf(
        groups.whole(param, shape),
        None if low is None else groups.whole(low, shape),
        *_encoded(new.first, leaf.first_scale, spec.first, groups, shape, None, nearest),
        *_encoded(new.root, leaf.second_scale, spec.second, groups, shape, chances, nearest),
    )
    pairs = zip(made, leaf, strict=True)
    return Leaf(*(None if a is None else jnp.where(by.keep != 0, a, b) for a, b in pairs))


def _decoded(
    codes: jax.Array | None, scale: jax.Array | None, code: Code, groups: Groups
) -> jax.Array | None:
    if codes is None or scale is None:
        return None
    return code.decode(groups.divided(codes), widened(groups.aligned(scale)))


def _encoded(
    value: jax.Array | None,
    old_scale: jax.Array | None,
    code: Code,
    groups: Groups,
    shape: tuple[int, ...],
    noise: jax.Array | None,
    nearest: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array | None, jax.Array | None]:
    if value is None or old_scale is None:
        return None, None
    axis = value.ndim + groups.axis
    scale = scale_of(jnp.max(jnp.abs(value), axis=axis, keepdims=True), old_scale.dtype)
    codes = code.encode(value, widened(scale), noise=noise, nearest=nearest)
    return groups.whole(codes, shape), jnp.squeeze(scale, axis)


def reshaped(arrays: Sequence[jax.Array], like: Leaf) -> Leaf:
    """Make a leaf from a kernel's results, in the shapes of the leaf that the kernel was given."""
    pairs = zip(like.present, arrays, strict=True)
    return leaf_of(like.present, [array.reshape(like[i].shape) for i, array in pairs])


def update(leaf: Leaf, grad: jax.Array, by: Scalars, spec: Spec) -> Leaf:
    """Step a leaf in plain JAX, as one block: the reference that every kernel must agree with."""
    shape, groups = leaf.param.shape, spec.groups
    at = None
    if spec.stochastic:
        # Positions are counted as in kernels, with the padding of a last group that is not full.
        count = math.prod(groups.scale_shape(shape)) * groups.size
        at = groups.whole(jnp.arange(count, dtype=jnp.uint32), shape)
    return update_block(leaf, grad, by, spec, groups, at=at)
