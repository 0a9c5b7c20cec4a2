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
from halfstep.quant._nibbles import packed, stored_shape, unpacked
from halfstep.quant._split import joined, parted, widened

SCALES = tuple(i for i, name in enumerate(Leaf._fields) if name.endswith("scale"))
"""The indices of the fields of a leaf that are scales."""


_CODES = (("int8", "root8"), ("int4", "root4"))


def refusal(leaf: Leaf, grad: HasType, spec: Spec) -> str | None:
    """Return why no kernel takes a leaf, or `None` if nothing common to all kernels forbids it."""
    if leaf.param.size == 0:
        return f"takes no empty leaf; got shape {list(leaf.param.shape)}"
    codes = (spec.first_code, spec.second_code)
    if codes not in _CODES or spec.groups.size != SIZE:
        return (
            f"takes moments in int8 and root8, or in int4 and root4, in groups of {SIZE}; got "
            f"{spec.first_code}, {spec.second_code} and {spec.groups.size}"
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

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape of codes where two share a byte."""
        dims = list(self.shape)
        dims[self.groups.axis] = self.groups.count(self.shape) * self.groups.size // 2
        return tuple(dims)

    def scale_block(self, block: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the scales that belong to a block."""
        rows, cols = block
        size = self.groups.size
        return (rows // size, cols) if self.groups.axis == -2 else (rows, cols // size)

    def arrays(self, leaf: Leaf, spec: Spec) -> list[jax.Array]:
        """Return the arrays of a leaf, in the shapes of the view."""
        shapes = dict.fromkeys(SCALES, self.scale_shape) | dict.fromkeys(
            spec.packed, self.packed_shape
        )
        return [leaf[i].reshape(shapes.get(i, self.shape)) for i in leaf.present]

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

    words = first_chances = second_chances = None
    if at is not None:
        at = groups.divided(at)
        words = hashed(at, by.seed, stream=0) if spec.stochastic else None
        first_chances = chances(at, by.seed, stream=2) if spec.first.bits == 4 else None
        is_random = spec.stochastic or spec.second.bits == 4
        second_chances = chances(at, by.seed, stream=1) if is_random else None
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
        *_encoded(new.first, leaf.first_scale, spec.first, groups, shape, first_chances, nearest),
        *_encoded(new.root, leaf.second_scale, spec.second, groups, shape, second_chances, nearest),
    )
    pairs = zip(made, leaf, strict=True)
    return Leaf(*(None if a is None else jnp.where(by.keep != 0, a, b) for a, b in pairs))


def _decoded(
    codes: jax.Array | None, scale: jax.Array | None, code: Code, groups: Groups
) -> jax.Array | None:
    if codes is None or scale is None:
        return None
    if code.bits == 4:
        axis = codes.ndim + groups.axis + 1
        halves = Groups(groups.axis, groups.size // 2).divided(codes.astype(jnp.int32))
        codes = unpacked(halves, axis, signed=not code.is_root)
    else:
        codes = groups.divided(codes)
    return code.decode(codes, widened(groups.aligned(scale)))


def chances(at: jax.Array, seed: jax.Array, *, stream: int) -> jax.Array:
    """Return random numbers in [0, 1) for given positions."""
    # Convert by way of int32, which every backend converts to floats. The shift has cleared the
    # sign.
    top = jax.lax.bitcast_convert_type(hashed(at, seed, stream=stream) >> 8, jnp.int32)
    return top.astype(jnp.float32) * 2.0**-24


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
    if code.bits == 4:
        stored = packed(codes, axis).reshape(stored_shape(shape, code, groups))
        return stored, jnp.squeeze(scale, axis)
    return groups.whole(codes, shape), jnp.squeeze(scale, axis)


def reshaped(arrays: Sequence[jax.Array], like: Leaf) -> Leaf:
    """Make a leaf from a kernel's results, in the shapes of the leaf that the kernel was given."""
    pairs = zip(like.present, arrays, strict=True)
    return leaf_of(like.present, [array.reshape(like[i].shape) for i, array in pairs])


def update(leaf: Leaf, grad: jax.Array, by: Scalars, spec: Spec) -> Leaf:
    """Step a leaf in plain JAX, as one block: the reference that every kernel must agree with."""
    shape, groups = leaf.param.shape, spec.groups
    at = None
    if spec.is_random:
        # Positions are counted as in kernels, with the padding of a last group that is not full.
        count = math.prod(groups.scale_shape(shape)) * groups.size
        at = groups.whole(jnp.arange(count, dtype=jnp.uint32), shape)
    return update_block(leaf, grad, by, spec, groups, at=at)
