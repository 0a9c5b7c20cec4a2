"""Store saved activations in 4 bits: blocks of a row, each with an offset and a step.

Fifteen levels lie at equal distances between the smallest and the largest finite element of a
block. Equal distances suit saved activations, which are shifted and skewed, such as the inputs of a
GELU. Formats such as e2m1 would spend their levels on both sides of zero. The sixteenth code stands
for minus infinity, the value of masked scores.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 16
_LEVELS = 15
_MASKED = 15


class Packed(NamedTuple):
    """An array in 4 bits, with an offset and a step for each block."""

    codes: jax.Array
    """Two codes in a byte: one of the first and one of the second half of the row."""
    offset: jax.Array
    step: jax.Array


def pack(value: jax.Array) -> Packed:
    """Encode an array in 4 bits; its rows must consist of whole blocks."""
    *outer, row = value.shape
    blocks = value.astype(jnp.float32).reshape(*outer, row // BLOCK, BLOCK)
    masked = blocks == -jnp.inf
    low = jnp.min(jnp.where(masked, jnp.inf, blocks), axis=-1, keepdims=True)
    # A block may be masked as a whole.
    low = jnp.where(low == jnp.inf, jnp.float32(0), low).astype(jnp.bfloat16)
    high = jnp.max(blocks, axis=-1, keepdims=True)
    start = low.astype(jnp.float32)
    # Rounded up, so that the last level is not below the largest element by more than half a step.
    wide = jnp.maximum(high - start, 0) * ((1 + 2**-8) / (_LEVELS - 1))
    step = wide.astype(jnp.bfloat16)
    width = step.astype(jnp.float32)
    scaled = (blocks - start) / jnp.where(width == 0, jnp.float32(1), width)
    levels = jnp.clip(jnp.round(scaled), 0, _LEVELS - 1).astype(jnp.uint8)
    codes = jnp.where(masked, jnp.uint8(_MASKED), levels).reshape(*outer, row)
    first, second = codes[..., : row // 2], codes[..., row // 2 :]
    return Packed(first | (second << 4), low[..., 0], step[..., 0])


def unpack(packed: Packed, dtype: np.dtype) -> jax.Array:
    """Decode an array from 4 bits."""
    codes = jnp.concatenate([packed.codes & 0xF, packed.codes >> 4], axis=-1)
    *outer, row = codes.shape
    blocks = codes.reshape(*outer, row // BLOCK, BLOCK)
    step = packed.step.astype(jnp.float32)[..., None]
    value = packed.offset.astype(jnp.float32)[..., None] + blocks.astype(jnp.float32) * step
    value = jnp.where(blocks == _MASKED, -jnp.inf, value)
    return value.astype(dtype).reshape(*outer, row)
