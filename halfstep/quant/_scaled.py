"""Write the factors of products in 8 and 4 bits: elements, and the scales to multiply them by."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import bitcast_convert_type
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Key, Shaped

from halfstep._policy import Factor
from halfstep.quant._stochastic import stochastic_round

# The smallest scale in e4m3.
_SMALLEST = 2.0**-9
# The largest element of 4 bits but one; its distance to the largest, 6, is the widest of all.
_FOUR = 4.0


class Scaled(NamedTuple):
    """An array written as elements times scales.

    `scale` has the elements' dimensions, with size 1 where elements share a scale. For blocks see
    `write_blocks`.
    """

    elements: Shaped[Array, "..."]
    scale: Float32[Array, "..."]


def power_of_two(amax: Float[Array, "..."], limit: float) -> Float32[Array, "..."]:
    """Return the largest power of two that scales a magnitude to at most a limit.

    The result is one for a magnitude of zero, and NaN for a magnitude that is not finite.
    """
    amax = amax.astype(jnp.float32)
    # The difference of two floats' bits, without those of the significand, is the exponent of
    # their quotient, rounded down.
    word = bitcast_convert_type(amax, jnp.int32)
    most = np.float32(limit).view(np.int32)
    exponent = jnp.clip((most - word) >> 23, -126, 126)
    scale = bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    scale = jnp.where(amax == 0, jnp.float32(1), scale)
    return jnp.where(jnp.isfinite(amax), scale, jnp.float32(jnp.nan))


def inverse(scale: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Return one divided by a power of two, exactly, by its exponent."""
    word = (254 << 23) - bitcast_convert_type(scale, jnp.int32)
    return jnp.where(jnp.isnan(scale), scale, bitcast_convert_type(word, jnp.float32))


def saturated(
    value: Float[Array, "..."], factor: Factor, *, key: Key[Array, ""] | None = None
) -> Shaped[Array, "..."]:
    """Round values to a factor's elements.

    Values beyond the largest element become that element; infinities become NaN. Elements of 4 bits
    have no NaN, so that their scale has to carry it.

    Args:
        value: The values to round.
        factor: The format of the elements, and how to round to it.
        key: The source of randomness, if the rounding is stochastic.
    """
    if factor.element != "e2m1":
        # Large values saturate, but an infinity is an error that a verdict must see. It becomes NaN
        # and not the largest element.
        value = jnp.where(jnp.isinf(value), jnp.asarray(jnp.nan, value.dtype), value)
    return _rounded(value, factor, key=key)


def _rounded(
    value: Float[Array, "..."], factor: Factor, *, key: Key[Array, ""] | None
) -> Shaped[Array, "..."]:
    """Round values to a factor's elements: infinities become the largest one."""
    limit = jnp.asarray(factor.max, value.dtype)
    inside = jnp.clip(value, -limit, limit)
    if factor.rounding == "nearest":
        return inside.astype(factor.dtype)
    if key is None:
        raise ValueError(
            f"stochastic rounding needs a key; got key=None for elements of {factor.element}. Pass "
            "key=jax.random.key(0)."
        )
    return stochastic_round(inside.astype(jnp.float32), factor.dtype, key=key)


def write(
    value: Float[Array, "..."],
    factor: Factor,
    *,
    summed: Sequence[int] = (),
    scale: Float32[Array, ""] | None = None,
    key: Key[Array, ""] | None = None,
) -> Scaled:
    """Write a factor with a scale of the whole tensor or of each row.

    Args:
        value: The values to write.
        factor: The format to write them in.
        summed: The dimensions that make up a row.
        scale: The power of two to multiply values by; by default the largest that keeps them in
            range.
        key: For stochastic rounding.
    """
    if scale is None:
        axes = tuple(summed) if factor.per == "row" else tuple(range(value.ndim))
        scale = power_of_two(jnp.max(jnp.abs(value), axis=axes, keepdims=True), factor.max)
    elements = saturated(value * scale.astype(value.dtype), factor, key=key)
    return Scaled(
        elements, jnp.reshape(inverse(scale), (1,) * value.ndim if not scale.ndim else scale.shape)
    )


class Blocks(NamedTuple):
    """A factor in blocks, as rows: `[batch, row, block, element]`.

    `scale` is `[batch, row or group of rows, block]`; `outer` is a scalar.
    """

    elements: Shaped[Array, "b r k e"]
    scale: Shaped[Array, "b g k"]
    outer: Float32[Array, ""]


def write_blocks(
    value: Float[Array, "b r n"], factor: Factor, *, key: Key[Array, ""] | None = None
) -> Blocks:
    """Write rows with a scale for each block, or for each tile with as many rows as columns.

    Args:
        value: A batch of rows.
        factor: The format to write them in.
        key: For stochastic rounding.
    """
    size = factor.size
    batch, rows, length = value.shape
    blocks = math.ceil(length / size)
    value = jnp.pad(value, ((0, 0), (0, 0), (0, blocks * size - length)))
    value = value.reshape(batch, rows, blocks, size)
    # Largest magnitudes are exact in every dtype: XLA need not write the rows in float32.
    amax = jnp.max(jnp.abs(value), axis=-1).astype(jnp.float32)
    if factor.per == "tile":
        amax = _over_tiles(amax, factor, jnp.max)
    if factor.two_level:
        # Three kernels or more read the rows. XLA would make each of them transpose the rows, and
        # store results in float32 for the next one.
        value = jax.lax.optimization_barrier(value)
        scale, up, outer = _two_levels(value, amax, factor)
    else:
        up = power_of_two(amax, factor.max)
        # A power of two needs only its exponent.
        scale, outer = inverse(up).astype(jnp.float8_e8m0fnu), jnp.float32(1)
    # A block with an infinity has a scale that is NaN, so that its elements need not say so.
    scaled = widened(value) * scale_of_rows(up, rows, factor)[..., None]
    return Blocks(_rounded(scaled, factor, key=key), scale, outer)


def _two_levels(
    value: Float[Array, "b r k e"], amax: Float32[Array, "b g k"], factor: Factor
) -> tuple[Shaped[Array, "b g k"], Float32[Array, "b g k"], Float32[Array, ""]]:
    """Return the scales of blocks as e4m3, their inverses, and the scale of the tensor.

    Args:
        value: The blocks.
        amax: The largest magnitude of each block or tile.
        factor: How they are written.
    """
    limit = float(jnp.finfo(jnp.float8_e4m3fn).max)
    largest = _FOUR if factor.four_or_six else factor.max
    up = power_of_two(jnp.max(amax / largest), limit)
    outer = inverse(up)

    def scaled_to(largest: float) -> tuple[Shaped[Array, "b g k"], Float32[Array, "b g k"]]:
        # A scale that rounds to zero would make zeros of its block, such as of those next to an
        # outlier of 100,000. The smallest scale keeps their magnitudes from a quarter of it on.
        needed = jnp.maximum(amax / largest * up, _SMALLEST)
        scale = needed.astype(jnp.float8_e4m3fn)
        back = scale.astype(jnp.float32) * outer
        # XLA may flush the smallest float32 numbers to zero.
        return scale, jnp.where(back == 0, 0, 1 / back)

    six = scaled_to(factor.max)
    if not factor.four_or_six:
        return *six, outer
    four = scaled_to(_FOUR)
    lost = [_lost(value, scale, inverted, factor) for scale, inverted in (four, six)]
    # Not less: a block with a NaN keeps the scale that says so, and so does a block of zeros.
    is_four = lost[0] < lost[1]
    return jnp.where(is_four, four[0], six[0]), jnp.where(is_four, four[1], six[1]), outer


def _lost(
    value: Float[Array, "b r k e"],
    scale: Shaped[Array, "b g k"],
    inverted: Float32[Array, "b g k"],
    factor: Factor,
) -> Float32[Array, "b g k"]:
    """Return the sum of squared errors of each block or tile that is rounded with its scale.

    It is in units of the square of the tensor's scale, which might be too small for float32.
    """
    rows = value.shape[1]
    nearest = dataclasses.replace(factor, rounding="nearest")
    # Errors of elements, and not of what they stand for: the kernel reads one scale of each block
    # and not two.
    value = widened(value) * scale_of_rows(inverted, rows, factor)[..., None]
    apart = _rounded(value, nearest, key=None).astype(jnp.float32) - value
    lost = jnp.sum(apart**2, axis=-1)
    if factor.per == "tile":
        lost = _over_tiles(lost, factor, jnp.sum)
    return lost * scale.astype(jnp.float32) ** 2


def widened(value: Float[Array, "..."]) -> Float32[Array, "..."]:
    """Return values in float32, so that XLA keeps them in 16 bits in memory.

    XLA removes a conversion to bfloat16 that is followed by one back, and then writes what was
    converted in float32, for all kernels that read it. That is twice the memory and the traffic. It
    does not see that moving 16 bits is a conversion too.
    """
    if value.dtype != jnp.bfloat16:
        return value.astype(jnp.float32)
    word = bitcast_convert_type(value, jnp.uint16).astype(jnp.uint32) << 16
    return bitcast_convert_type(word, jnp.float32)


def _over_tiles(
    value: Float32[Array, "b r k"], factor: Factor, reduce: Callable[..., Array]
) -> Float32[Array, "b g k"]:
    """Reduce numbers of rows over the rows of each tile; zeros stand for rows that are missing."""
    batch, rows, blocks = value.shape
    groups = math.ceil(rows / factor.size)
    filled = jnp.pad(value, ((0, 0), (0, groups * factor.size - rows), (0, 0)))
    return reduce(filled.reshape(batch, groups, factor.size, blocks), axis=2)


def read_blocks(
    array: Blocks, factor: Factor, *, length: int, dtype: DTypeLike = jnp.bfloat16
) -> Float[Array, "b r n"]:
    """Return the rows that blocks represent, without the padding of the last block.

    In bfloat16 this is exact: an element has at most 4 bits, and so does a scale.
    """
    batch, rows, blocks, size = array.elements.shape
    scale = scale_of_rows(array.scale.astype(jnp.float32) * array.outer, rows, factor)
    value = decoded(array.elements, scale, dtype)
    return value.reshape(batch, rows, blocks * size)[:, :, :length]


def decoded(
    elements: Shaped[Array, "b r k e"], scale: Shaped[Array, "b r k"], dtype: DTypeLike
) -> Float[Array, "b r k e"]:
    """Return the numbers that elements represent, each block of them with its scale."""
    return (elements.astype(jnp.float32) * scale.astype(jnp.float32)[..., None]).astype(dtype)


def scale_of_rows(scale: Shaped[Array, "..."], rows: int, factor: Factor) -> Shaped[Array, "..."]:
    """Return the scales of each row, repeated from the scales of tiles."""
    return jnp.repeat(scale, factor.size, axis=1)[:, :rows] if factor.per == "tile" else scale
