"""Keep residuals for the backward pass in 8 bits instead of 16.

The forward pass does not change. The gradient is computed from operands that are rounded to 8 bits,
each row with a scale of its own.
"""

from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import bitcast_convert_type

from halfstep._policy import Factor
from halfstep._program import size
from halfstep.quant._scaled import inverse, power_of_two, saturated

# Smaller rows and arrays are not worth a scale.
_LEAST_ROW, _LEAST = 16, 1024
# The bits of plus and minus infinity. e4m3 has no infinities: its two NaNs stand for them, and a
# NaN in a row makes the scale of that row NaN.
_INFINITIES = MappingProxyType({"e4m3": (0x7F, 0xFF), "e5m2": (0x7C, 0xFC)})


class Kept(NamedTuple):
    """An array in 8 bits, with a scale for each row."""

    elements: jax.Array
    scale: jax.Array


def keep(value: jax.Array, factor: Factor) -> jax.Array | Kept:
    """Return an array as it is kept: in 8 bits if it is large and has 16 bits."""
    row = value.shape[-1] if value.ndim >= 2 else 0
    # A row whose length is a symbol of `jax.export` may be short.
    fits = isinstance(row, int) and row >= _LEAST_ROW and size(value) >= _LEAST
    if not fits or value.dtype.itemsize != 2 or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    # A masked score is infinite and stays infinite: the scale depends on the others only.
    infinite = jnp.isinf(value)
    amax = jnp.max(jnp.abs(jnp.where(infinite, 0, value)), axis=-1, keepdims=True)
    scale = power_of_two(amax, factor.max)
    elements = saturated(value * scale.astype(value.dtype), factor)
    code = jnp.where(value > 0, *_INFINITIES[factor.element]).astype(jnp.uint8)
    bits = jnp.where(infinite, code, bitcast_convert_type(elements, jnp.uint8))
    # The scale is a power of two, so bfloat16 holds it.
    return Kept(bitcast_convert_type(bits, factor.dtype), inverse(scale).astype(jnp.bfloat16))


def restore(value: jax.Array | Kept, dtype: np.dtype) -> jax.Array:
    """Return an array that was kept, in a dtype."""
    if not isinstance(value, Kept):
        return value
    wide = value.elements.astype(jnp.float32)
    if value.elements.dtype == jnp.float8_e4m3fn:
        negative = bitcast_convert_type(value.elements, jnp.uint8) >= 0x80
        sign = jnp.where(negative, -jnp.inf, jnp.inf)
        wide = jnp.where(jnp.isnan(wide), sign.astype(jnp.float32), wide)
    return (wide * value.scale.astype(jnp.float32)).astype(dtype)
