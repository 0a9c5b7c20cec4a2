"""Rounding up or down at random, so that the mean is right."""

from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import bitcast_convert_type
from jaxtyping import Array, Float32, Key, Shaped

_WORDS = MappingProxyType({1: jnp.uint8, 2: jnp.uint16})


def stochastic_round(
    value: Float32[Array, "..."], dtype: Any, *, key: Key[Array, ""]
) -> Shaped[Array, "..."]:
    """Round float32 values to one of their two neighbors in a narrower format, at random.

    The nearer neighbor is the likelier one, in the proportion that makes the mean of many
    roundings the value itself. What the format can hold is never changed. Beyond the largest
    finite value it is rounded as a conversion rounds, and what is not finite stays so.

    Args:
        value: What is rounded.
        dtype: A float format of 16 or 8 bits.
        key: Where randomness comes from. The same key gives the same result.

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
    dtype = jnp.dtype(dtype)
    word = _word(dtype)
    nearest = value.astype(dtype)
    back = nearest.astype(jnp.float32)
    # The neighbor on the other side of the value: one code up or down in magnitude.
    bits = bitcast_convert_type(nearest, word)
    away = jnp.abs(back) < jnp.abs(value)
    other = bitcast_convert_type(jnp.where(away, bits + 1, bits - 1).astype(word), dtype)
    # Past zero the neighbor is zero's own, of the value's sign.
    smallest = bitcast_convert_type(jnp.asarray(1, word), dtype)
    other = jnp.where(
        back == 0, jnp.copysign(smallest.astype(jnp.float32), value), other.astype(jnp.float32)
    )
    gap = other - back
    chance = jnp.where(gap == 0, 0, (value - back) / gap)
    noise = jax.random.uniform(key, value.shape, jnp.float32)
    moved = jnp.where(noise < chance, other, back)
    inside = jnp.isfinite(back) & jnp.isfinite(other) & jnp.isfinite(value)
    return jnp.where(inside, moved, back).astype(dtype)


def _word(dtype: np.dtype) -> Any:
    if dtype.itemsize not in _WORDS or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"stochastic_round needs a float format of 16 or 8 bits; got dtype={dtype.name}"
        )
    return _WORDS[dtype.itemsize]
