"""Compute the update on XLA:CPU in a few passes, each a fused loop that all cores share.

XLA:CPU gives a fused loop only one result. The plain form therefore keeps values that several
results need in float32 arrays, which take 19 bytes per element. Here every array has its own pass,
which decodes the values that it needs once more and writes in place. Only the low bits are held
twice, while the parameter is written: 1 byte per element.

A trick keeps the compiler from merging the passes. Each pass combines the values that it decodes
with a zero that the compiler cannot know to be zero. The zero is read from the result of the
previous pass, which also orders the passes. In addition, reductions are written as maxima of
slices, which become loops over columns; reductions by `jnp.max` do not.

Moments of 4 bits take the plain form.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import bitcast_convert_type
from jaxtyping import PyTree

from halfstep.kernels.flash_update import _block
from halfstep.kernels.flash_update._rule import (
    HasType,
    Leaf,
    Moments,
    Scalars,
    Spec,
    noise,
    updated,
)
from halfstep.quant._codes import scale_of
from halfstep.quant._split import join, parted, widened, word_dtype, words

MIN_SIZE = 1 << 20
"""Smaller leaves are updated in the plain form: they fit in caches, and passes would cost more."""

# XLA stops merging if one value would be computed in more than 15 places.
_FOLD = 8


def update(
    leaf: Leaf, grad: jax.Array, by: Scalars, spec: Spec, *, min_size: int = MIN_SIZE
) -> Leaf:
    """Step a leaf, as `_block.update` does.

    Args:
        leaf: The parameter and its state, on one device.
        grad: The gradient.
        by: The hyperparameters of the step.
        spec: The optimizer, and how its state is stored.
        min_size: Leaves with fewer elements take the plain form.
    """
    # Leaves that do not fit take the plain form too. It is right for every leaf, and only needs
    # more memory.
    if not _fits(leaf, grad, spec) or leaf.param.size < min_size:
        return _block.update(leaf, grad, by, spec)
    # The low bits come first, since they need the old parameter. The moments come last, since all
    # others need the old moments. For the same reason, scales are computed before codes and written
    # after them.
    keep = jnp.asarray(by.keep, bool)
    passes = _Passes(leaf, grad, by, spec)
    # This zero is read from an argument. If it were read from a result, it would be one more use of
    # the values behind that result, and XLA would compute these twice or keep them.
    zero = _zero_after(leaf.first)
    always = zero == 0
    low = None
    if leaf.low is not None:
        low = jnp.where(keep, passes.low(zero), leaf.low)
        zero = _after(low, always)
    param = jnp.where(keep, passes.param(zero), leaf.param)
    scales = passes.scales(_after(param, always), always)
    zero = _after(scales[0], always)
    first = jnp.where(keep, passes.first(zero, scales[0]), leaf.first)
    zero = _after(first, always)
    second = second_scale = None
    if leaf.second is not None:
        second = jnp.where(keep, passes.second(zero, scales[1]), leaf.second)
        zero = _after(second, always)
        second_scale = _stored(scales[1], zero, leaf.second_scale, keep)
    first_scale = _stored(scales[0], zero, leaf.first_scale, keep)
    return Leaf(param, low, first, first_scale, second, second_scale)


def _fits(leaf: Leaf, grad: HasType, spec: Spec) -> bool:
    shape, groups = leaf.param.shape, spec.groups
    floats = (jnp.bfloat16, jnp.float32)
    return (
        leaf.first is not None
        and not spec.coupled
        and leaf.first.dtype == jnp.int8
        and (leaf.second is None or leaf.second.dtype == jnp.uint8)
        and leaf.param.dtype in floats
        and grad.dtype in floats
        and len(shape) > 1
        and groups.axis == -2
        and shape[-2] % groups.size == 0
        and groups.size % _FOLD == 0
        and math.prod(shape) > 0
    )


class _Passes(NamedTuple):
    """The results that take one pass each. The compiler cannot know that `zero` is zero."""

    leaf: Leaf
    grad: jax.Array
    by: Scalars
    spec: Spec

    def low(self, zero: jax.Array) -> jax.Array:
        """Return the bits that the parameter lacks."""
        return self._split(zero)[1]

    def param(self, zero: jax.Array) -> jax.Array:
        """Return the parameter."""
        return self._split(zero)[0]

    def first(self, zero: jax.Array, scale: jax.Array) -> jax.Array:
        """Return the codes of the first moment."""
        new = self._new(zero)
        return self.spec.first.encode(new.first, self._spread(_floats(scale)))

    def second(self, zero: jax.Array, scale: jax.Array) -> jax.Array:
        """Return the codes of the second moment."""
        chances = None
        if self.spec.stochastic:
            bits = noise(self.leaf.param.shape, self.by.seed, stream=1)
            chances = (bits >> 8).astype(jnp.float32) * 2.0**-24
        wide = self._spread(_floats(scale))
        return self.spec.second.encode(self._new(zero).root, wide, noise=chances)

    def scales(self, zero: jax.Array, always: jax.Array) -> list[jax.Array]:
        """Return the scales of both moments as words, in two passes. The second is small."""
        leaf, groups = self.leaf, self.spec.groups
        first = (leaf.first, leaf.first_scale)
        second = () if leaf.second is None else (leaf.second, leaf.second_scale)
        shape = groups.scale_shape(leaf.param.shape)
        parts = (*shape[:-1], groups.size // _FOLD, shape[-1])
        dtypes = [word_dtype(scale.dtype) for scale in (first[1], *second[1:])]
        largest = _barrier(
            self._largest, [jax.ShapeDtypeStruct(parts, dtype) for dtype in dtypes], always
        )
        found = largest(zero, self.grad, *first, *second)
        whole = _barrier(
            _over_parts, [jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes], always
        )
        return list(whole(*found))

    def _largest(self, zero: jax.Array, grad: jax.Array, *moments: jax.Array) -> list[jax.Array]:
        """Return the scales of every eight elements."""
        folded = [self._folded(x) for x in (words(grad), moments[0], *moments[2:3])]
        wide = [widened(s)[..., None, :] for s in (moments[1], *moments[3:])]
        found: list[jax.Array] = []
        for row in range(_FOLD):
            grad_row, *codes = (_opaque(x[..., row, :], zero) for x in folded)
            old = [
                code.decode(c, s)
                for code, c, s in zip(
                    (self.spec.first, self.spec.second), codes, wide, strict=False
                )
            ]
            moments_row = Moments(jnp.float32(0), old[0], old[1] * old[1] if old[1:] else None)
            new = updated(moments_row, _floats(grad_row), self.by, self.spec)
            # The words of values that are not negative are in the order of the values, with NaN as
            # the largest. A maximum of floats might drop a NaN.
            magnitudes = [jnp.abs(new.first), *([new.second] if old[1:] else [])]
            row_words = [bitcast_convert_type(x, jnp.int32) for x in magnitudes]
            found = [*map(jnp.maximum, found, row_words)] if found else row_words
        values = [bitcast_convert_type(x, jnp.float32) for x in found]
        values = [values[0], *map(jnp.sqrt, values[1:])]
        dtypes = [s.dtype for s in (moments[1], *moments[3:])]
        return [words(scale_of(*pair)) for pair in zip(values, dtypes, strict=True)]

    def _new(self, zero: jax.Array) -> Moments:
        """Return the values after the step. XLA drops the values that a pass does not use."""
        leaf, spec = self.leaf, self.spec
        if leaf.low is None:
            value = _opaque(widened(leaf.param), zero)
        else:
            value = join(leaf.param, _opaque(leaf.low, zero))
        second = None
        if leaf.second is not None:
            root = spec.second.decode(_opaque(leaf.second, zero), self._scale(leaf.second_scale))
            second = root * root
        first = spec.first.decode(_opaque(leaf.first, zero), self._scale(leaf.first_scale))
        grad = _opaque(widened(self.grad), zero)
        return updated(Moments(value, first, second), grad, self.by, spec)

    def _split(self, zero: jax.Array) -> tuple[jax.Array, Any]:
        bits = None
        if self.spec.stochastic:
            seed = self.by.seed.astype(jnp.uint32) + zero
            bits = noise(self.leaf.param.shape, seed, stream=0)
        return parted(self._new(zero).value, self.leaf.param, self.leaf.low, bits)

    def _scale(self, scale: jax.Array) -> jax.Array:
        return self._spread(widened(scale))

    def _spread(self, scale: jax.Array) -> jax.Array:
        """Broadcast scales to the shape of the leaf: only then is the leaf written in place."""
        shape, size = self.leaf.param.shape, self.spec.groups.size
        rows = (*scale.shape[:-1], size, scale.shape[-1])
        return jnp.broadcast_to(scale[..., None, :], rows).reshape(shape)

    def _folded(self, value: jax.Array) -> jax.Array:
        """Divide the rows of a group into parts of eight."""
        *lead, rows, columns = value.shape
        size = self.spec.groups.size
        return value.reshape(*lead, rows // size, size // _FOLD, _FOLD, columns)


def _over_parts(*parts: jax.Array) -> list[jax.Array]:
    slices = ([x[..., row, :] for row in range(x.shape[-2])] for x in parts)
    return [functools.reduce(jnp.maximum, rows) for rows in slices]


def _stored(bits: jax.Array, zero: jax.Array, old: jax.Array, keep: jax.Array) -> jax.Array:
    new = bitcast_convert_type(_opaque(bits, zero), old.dtype)
    return jnp.where(keep, new, old)


def _opaque(value: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the same value in a form that the compiler takes for another value."""
    bits = words(value)
    return bitcast_convert_type(bits ^ zero.astype(bits.dtype), value.dtype)


def _after(value: jax.Array, always: jax.Array) -> jax.Array:
    """Return a zero that is known only after `value` is."""
    return _barrier(_zero_after, jax.ShapeDtypeStruct((), jnp.uint32), always)(value)


def _zero_after(value: jax.Array) -> jax.Array:
    # `word | 1` is never zero, but XLA does not simplify the comparison away.
    word = words(value[(0,) * value.ndim])
    return ((word | 1) == 0).astype(jnp.uint32)


def _barrier(
    compute: Callable[..., PyTree], made: PyTree, always: jax.Array
) -> Callable[..., PyTree]:
    """Return a function that is compiled by itself, in a branch that is always taken."""

    def call(*operands: jax.Array) -> PyTree:
        # XLA fuses nothing across the branches of a conditional, and cannot know that this one is
        # always taken.
        def nothing(*_: object) -> PyTree:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)

        return jax.lax.cond(always, compute, nothing, *operands)

    return call


def _floats(bits: jax.Array) -> jax.Array:
    if bits.dtype == jnp.uint16:
        # The words of bfloat16 are the upper half of those of float32.
        bits = bits.astype(jnp.uint32) << 16
    return bitcast_convert_type(bits, jnp.float32)
