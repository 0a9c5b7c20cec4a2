"""Round up or down at random, so that the mean is right."""

from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import bitcast_convert_type
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Key, Shaped

from halfstep._base import checked_but
from halfstep.quant._split import check_dtype


@checked_but("dtype")
def stochastic_round(
    value: Float32[Array, "..."], dtype: DTypeLike, *, key: Key[Array, ""]
) -> Shaped[Array, "..."]:
    """Round float32 values to one of their two neighbors in a narrower format, at random.

    The nearer neighbor is the likelier one, in the proportion that makes the mean of many
    roundings the value itself. Values that the format can hold never change. Values beyond its
    largest finite one are rounded as a conversion rounds, and values that are not finite stay so.

    Rounding to bfloat16 uses integer arithmetic, and is right for denormal values as well. Other
    formats have no values near float32's denormal values, which are rounded to zero.

    Args:
        value: The values to round, in float32.
        dtype: bfloat16, float16, float8_e4m3fn, float8_e5m2 or float4_e2m1fn.
        key: The source of randomness. The same key gives the same result.

    Returns:
        Values of the format.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import quant

        third = jnp.full((10_000,), 1 / 3, jnp.float32)
        rounded = quant.stochastic_round(third, "bfloat16", key=jax.random.key(0))
        assert jnp.unique(rounded).size == 2
        assert abs(jnp.mean(rounded.astype("float32")) - 1 / 3) < 1e-4
        ```
    """
    try:
        found = jnp.dtype(dtype)
    except (TypeError, ValueError):
        found = None
    if found is None or found not in _WORDS:
        shown = f"a {type(dtype).__name__}" if found is None else found.name
        raise TypeError(
            f"stochastic_round needs a dtype of {', '.join(d.name for d in _WORDS)}; got {shown}."
        )
    dtype = found
    check_dtype(value, jnp.float32, "stochastic_round")
    if dtype == jnp.bfloat16:
        return _to_bfloat16(value, key)
    noise = jax.random.uniform(key, value.shape, jnp.float32)
    if dtype == jnp.float4_e2m1fn:
        return _to_four_bits(value, noise)
    return _to_float(value, dtype, noise)


def _to_bfloat16(value: Float32[Array, "..."], key: Key[Array, ""]) -> Shaped[Array, "..."]:
    # The 16 bits that are cut off, plus 16 random ones, carry with the probability that makes the
    # mean right. This is exact, and the same for denormal values.
    word = bitcast_convert_type(value, jnp.uint32)
    noise = jax.random.bits(key, value.shape, jnp.uint16).astype(jnp.uint32)
    high = ((word + noise) >> 16).astype(jnp.uint16)
    is_inside = (word & 0x7FFFFFFF) <= _LARGEST_BFLOAT16
    moved = bitcast_convert_type(high, jnp.bfloat16)
    return jnp.where(is_inside, moved, value.astype(jnp.bfloat16))


def _to_float(
    value: Float32[Array, "..."], dtype: np.dtype, noise: Float32[Array, "..."]
) -> Shaped[Array, "..."]:
    word = _WORDS[dtype]
    nearest = value.astype(dtype)
    back = nearest.astype(jnp.float32)
    # The neighbor on the other side of the value: one code up or down in magnitude.
    bits = bitcast_convert_type(nearest, word)
    away = jnp.abs(back) < jnp.abs(value)
    other = bitcast_convert_type(jnp.where(away, bits + 1, bits - 1).astype(word), dtype)
    # The other neighbor of zero is the smallest number with the value's sign.
    smallest = bitcast_convert_type(jnp.asarray(1, word), dtype)
    other = jnp.where(
        back == 0, jnp.copysign(smallest.astype(jnp.float32), value), other.astype(jnp.float32)
    )
    chance = (value - back) / (other - back)
    moved = jnp.where(noise < chance, other, back)
    inside = jnp.isfinite(back) & jnp.isfinite(other) & jnp.isfinite(value)
    return jnp.where(inside, moved, back).astype(dtype)


def _to_four_bits(
    value: Float32[Array, "..."], noise: Float32[Array, "..."]
) -> Shaped[Array, "..."]:
    # Neighbors among the values 0, 1/2, 1, 3/2, 2, 3, 4, 6 have three distances, all of them powers
    # of two.
    size = jnp.abs(value)
    step = jnp.where(
        size < 2, jnp.float32(0.5), jnp.where(size < 4, jnp.float32(1), jnp.float32(2))
    )
    moved = jnp.floor(size / step + noise) * step
    rounded = jnp.where(size < 6, moved, size)
    return jnp.copysign(rounded, value).astype(jnp.float4_e2m1fn)


_LARGEST_BFLOAT16 = 0x7F7F0000
_WORDS = MappingProxyType(
    {
        jnp.dtype(jnp.bfloat16): jnp.uint16,
        jnp.dtype(jnp.float16): jnp.uint16,
        jnp.dtype(jnp.float8_e4m3fn): jnp.uint8,
        jnp.dtype(jnp.float8_e5m2): jnp.uint8,
        jnp.dtype(jnp.float4_e2m1fn): jnp.uint8,
    }
)
