"""Compute the update with XLA:GPU alone, in two passes: new scales first, then everything else.

This form is for GPUs on which the Mosaic kernel of `_gpu` is not used, and for leaves that the
kernel does not take. XLA:GPU compiles it into four kernels. The first pass reads the gradient and
the moments and writes the new scales to a temporary: 0.125 bytes per parameter. The second pass is
element-wise, so that XLA updates parameters and moments in place, in one kernel.

The plain form of `_block.update` needs 13 bytes of temporaries per parameter on a GPU. Three things
make the difference:

- The maximum of a group is a `reduce_window` and not a `reduce`. XLA:GPU computes a window inside
  the thread that needs it. For a `reduce` over rows, it transposes every operand.
- Nothing is shared between the two passes or between two results of the second pass. XLA:GPU writes
  a value to memory if two kernels need it; it merges kernels only afterwards. Each result therefore
  starts from its own copy of the gradient (`_copy`), which only LLVM knows to be equal: inside the
  merged kernel, the common work is done once.
- Arrays keep their shapes. Merging or splitting axes would move data between devices where the
  compiler divides the update.
"""

import math

import jax
import jax.numpy as jnp
from jax.lax import bitcast_convert_type

from halfstep.kernels.flash_update._block import chances
from halfstep.kernels.flash_update._rule import Leaf, Moments, Scalars, Spec, hashed, updated
from halfstep.quant._codes import Code, scale_of
from halfstep.quant._groups import Groups
from halfstep.quant._nibbles import packed, stored_shape, unpacked
from halfstep.quant._split import joined, parted, widened, word_dtype, words


def update(leaf: Leaf, grad: jax.Array, by: Scalars, spec: Spec) -> Leaf:
    """Return a leaf after one step.

    Args:
        leaf: The parameter and its state.
        grad: The gradient, in any float dtype.
        by: The hyperparameters of the step.
        spec: The optimizer, and how its state is stored.
    """
    keep = by.keep != 0

    def new(number: int) -> Moments:
        return _stepped(leaf, _copy(grad, number), by, spec)

    def stored(value: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(keep, value, old)

    moments = new(0)
    bits = first_chances = second_chances = None
    if spec.is_random:
        at = _position(leaf.param.shape, spec.groups)
        bits = hashed(at, by.seed, stream=0) if spec.stochastic else None
        first_chances = chances(at, by.seed, stream=2) if spec.first.bits == 4 else None
        second_chances = chances(at, by.seed, stream=1)
    param = stored(parted(new(1).value, leaf.param, leaf.low, bits)[0], leaf.param)
    low = first = first_scale = second = second_scale = None
    if leaf.low is not None:
        low = stored(parted(new(2).value, leaf.param, leaf.low, bits)[1], leaf.low)
    if leaf.first is not None:
        first_scale = _scale(moments.first, leaf.first_scale, spec.groups, keep)
        wide = _spread(first_scale, grad, spec.groups)
        codes = spec.first.encode(new(3).first, wide, noise=first_chances)
        first = stored(_packed(codes, spec.first, spec.groups), leaf.first)
    if leaf.second is not None:
        second_scale = _scale(moments.root, leaf.second_scale, spec.groups, keep)
        wide = _spread(second_scale, grad, spec.groups)
        codes = spec.second.encode(new(4).root, wide, noise=second_chances)
        second = stored(_packed(codes, spec.second, spec.groups), leaf.second)
    return Leaf(param, low, first, first_scale, second, second_scale)


def _stepped(leaf: Leaf, grad: jax.Array, by: Scalars, spec: Spec) -> Moments:
    """Decode a leaf and compute its values after the step. XLA drops unused values."""
    first = second = None
    if leaf.first is not None:
        codes = _codes(leaf.first, spec.first, grad.shape, spec.groups)
        first = spec.first.decode(codes, _spread(leaf.first_scale, grad, spec.groups))
    if leaf.second is not None:
        codes = _codes(leaf.second, spec.second, grad.shape, spec.groups)
        root = spec.second.decode(codes, _spread(leaf.second_scale, grad, spec.groups))
        second = root * root
    return updated(Moments(joined(leaf.param, leaf.low), first, second), widened(grad), by, spec)


def _scale(value: jax.Array, old: jax.Array, groups: Groups, keep: jax.Array) -> jax.Array:
    """Return the scales of values, in the shape of the old ones."""
    axis = value.ndim + groups.axis
    window = [groups.size if i == axis else 1 for i in range(value.ndim)]
    missing = groups.count(value.shape) * groups.size - value.shape[axis]
    padding = [(0, missing if i == axis else 0) for i in range(value.ndim)]
    largest = jax.lax.reduce_window(
        jnp.abs(value), jnp.float32(0), jax.lax.max, window, window, padding
    )
    return jnp.where(keep, scale_of(largest, old.dtype), old)


def _spread(scale: jax.Array, grad: jax.Array, groups: Groups) -> jax.Array:
    """Return the scale of every element in float32.

    Without the mask, XLA would compute everything that depends on scales alone before it broadcasts
    the scales, and keep the result in memory.
    """
    axis = grad.ndim + groups.axis
    wide = groups.aligned(scale)
    wide = jnp.broadcast_to(wide, (*wide.shape[: axis + 1], groups.size, *wide.shape[axis + 2 :]))
    mask = words(grad).astype(word_dtype(scale.dtype))
    return widened(_masked(groups.whole(wide, grad.shape), mask))


def _codes(stored: jax.Array, code: Code, shape: tuple[int, ...], groups: Groups) -> jax.Array:
    """Return one code for each element."""
    if code.bits == 8:
        return stored
    halves = Groups(groups.axis, groups.size // 2).divided(stored)
    both = unpacked(halves, stored.ndim + groups.axis + 1, signed=not code.is_root)
    return groups.whole(both, shape)


def _packed(codes: jax.Array, code: Code, groups: Groups) -> jax.Array:
    """Undo `_codes`."""
    if code.bits == 8:
        return codes
    made = packed(groups.divided(codes), codes.ndim + groups.axis + 1)
    return made.reshape(stored_shape(codes.shape, code, groups))


def _copy(value: jax.Array, number: int) -> jax.Array:
    """Return the same value in a form that XLA, but not LLVM, takes for another value."""
    return _masked(value, jnp.asarray(number, word_dtype(value.dtype)))


def _masked(value: jax.Array, mask: jax.Array) -> jax.Array:
    return bitcast_convert_type((words(value) ^ mask) ^ mask, value.dtype)


def _position(shape: tuple[int, ...], groups: Groups) -> jax.Array:
    """Return the position of every element, counted with full groups, as the kernels count."""
    full = list(shape)
    full[groups.axis] = groups.count(shape) * groups.size
    at = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = math.prod(full[axis + 1 :]) % 2**32
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        at = at + index * jnp.uint32(stride)
    return at
