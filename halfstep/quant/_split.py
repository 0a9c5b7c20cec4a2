"""Split a float32 value exactly into a bfloat16 value and the bits that it lacks."""

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.lax import bitcast_convert_type
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Float32, Int8, Int16, Shaped, UInt32

from halfstep._base import checked, type_of

Low = Int16[Array, "..."] | Int8[Array, "..."]


@checked
def split(
    value: Float32[Array, "..."],
    *,
    bits: Literal[8, 16] = 16,
    noise: UInt32[Array, "..."] | None = None,
) -> tuple[BFloat16[Array, "..."], Low]:
    """Split float32 values into bfloat16 ones, to compute with, and the rest of their bits.

    The split uses integer arithmetic. With 16 more bits, `join` restores every float32 value bit
    for bit, including denormal values, signed zeros and infinities. With 8 more bits, values are
    first rounded to 24 bits, which is within `2**-16` of every normal value. Values that are less
    than half a step below infinity, from `2**128 - 2**111` on, then become infinite.

    The bfloat16 value is the one nearest to what `join` restores; a tie goes to the larger
    magnitude. It is infinite from `2**128 - 2**119` on, and the rest still leads back to the finite
    value.

    `join` restores a NaN as a NaN, but not always with the same bits, and its bfloat16 value may be
    infinite.

    Args:
        value: The values to split.
        bits: The number of bits of the second part.
        noise: Random words, one for each value. Bits that 8 bits cannot hold are then rounded up or
            down at random, so that the mean of many roundings is right.

    Returns:
        The bfloat16 values, and integers of 16 or 8 bits.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import quant

        value = jnp.float32(1) / 3
        high, low = quant.split(value)
        assert high.dtype == jnp.bfloat16
        assert quant.join(high, low) == value
        ```
    """
    check_dtype(value, jnp.float32, "split")
    if bits not in (8, 16):
        raise ValueError(f"bits must be 8 or 16; got {bits!r}.")
    if noise is not None and getattr(noise, "dtype", None) != jnp.uint32:
        raise TypeError(
            f"`noise` of split must be random words, uint32; got {type_of(noise)}. Pass "
            "jax.random.bits(key, value.shape)."
        )
    word = bitcast_convert_type(value, jnp.uint32)
    # Sign and magnitude are kept apart, so that a carry moves a magnitude to the next one and never
    # changes the sign.
    sign, size = word & jnp.uint32(0x80000000), word & jnp.uint32(0x7FFFFFFF)
    if bits == 8:
        # Rounding to 24 bits would make a NaN infinite if only its low bits are set, so all NaNs
        # become the same one.
        is_nan = size > 0x7F800000
        more = jnp.uint32(0x80) if noise is None else noise & 0xFF
        size = (size + more) & jnp.uint32(0x7FFFFF00)
        size = jnp.where(is_nan, jnp.uint32(0x7FC00000), size)
    else:
        # The NaNs with the largest bits would carry into the sign, so the minimum replaces them. It
        # is a minimum of signed integers, since Mosaic TPU has no unsigned minimum.
        signed = jnp.minimum(bitcast_convert_type(size, jnp.int32), 0x7FFF7FFF)
        size = bitcast_convert_type(signed, jnp.uint32)
    word = sign | size
    # Round to the nearest and do not truncate: models compute with the bfloat16 value alone. The
    # rest is then a signed distance, which fits into as many bits.
    high = (word + 0x8000) >> 16
    low = bitcast_convert_type(word - (high << 16), jnp.int32)
    low = (low >> 8).astype(jnp.int8) if bits == 8 else low.astype(jnp.int16)
    return bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16), low


@checked
def join(high: BFloat16[Array, "..."], low: Low) -> Float32[Array, "..."]:
    """Return the float32 values that `split` has split.

    Args:
        high: The bfloat16 values.
        low: The bits that they lack, 16 or 8.

    Returns:
        Float32 values: with 16 bits the original values, with 8 bits the nearest of 24 bits.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import quant

        value = jnp.float32(1) / 3
        near = quant.join(*quant.split(value, bits=8))
        assert 0 < abs(near - value) <= 2**-16 * value
        ```
    """
    check_dtype(high, jnp.bfloat16, "`high` of join")
    if low.dtype not in (jnp.int8, jnp.int16):
        raise TypeError(f"`low` of join needs int8 or int16; got {type_of(low)}.")
    word = bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32)
    size = bitcast_convert_type((word & 0x7FFF) << 16, jnp.int32)
    rest = low.astype(jnp.int32)
    rest = rest << 8 if low.dtype == jnp.int8 else rest
    # The sum is never below zero for the results of `split`. If a parameter was changed without its
    # rest, the sum would carry into the sign and become a NaN.
    size = bitcast_convert_type(jnp.maximum(size + rest, 0), jnp.uint32)
    return bitcast_convert_type(((word & 0x8000) << 16) | size, jnp.float32)


def widened(value: Shaped[Array, "..."]) -> Float32[Array, "..."]:
    """Convert any float to float32; bfloat16 by its bits, to keep denormal values."""
    if value.dtype == jnp.bfloat16:
        word = bitcast_convert_type(value, jnp.uint16).astype(jnp.uint32) << 16
        return bitcast_convert_type(word, jnp.float32)
    return value.astype(jnp.float32)


def word_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the unsigned integer dtype that is as wide as a dtype."""
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def words(value: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """Return the bits of values as unsigned integers."""
    return bitcast_convert_type(value, word_dtype(value.dtype))


def check_dtype(value: Shaped[Array, "..."], dtype: DTypeLike, who: str) -> None:
    """Raise unless an array has the dtype whose bits the caller reads."""
    wanted = jnp.dtype(dtype)
    if value.dtype != wanted:
        raise TypeError(
            f"{who} needs {wanted.name}; got {type_of(value)}. "
            f"Convert it: value.astype(jnp.{wanted.name})."
        )


def joined(param: Shaped[Array, "..."], low: Low | None) -> Float32[Array, "..."]:
    """Return the float32 value of a parameter, with the bits that it lacks if they are stored."""
    return widened(param) if low is None else join(param, low)


def parted(
    value: Shaped[Array, "..."],
    param: Shaped[Array, "..."],
    low: Low | None,
    noise: UInt32[Array, "..."] | None = None,
) -> tuple[Shaped[Array, "..."], Any]:
    """Store a new value of a parameter like the old one: split, or converted."""
    if low is None:
        return value.astype(param.dtype), None
    return split(value, bits=8 if low.dtype == jnp.int8 else 16, noise=noise)
