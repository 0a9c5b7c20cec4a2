"""Encode factors for one leg of a product, and decode them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep._autocast.f8.dimensions import Roles, as_rows, from_rows
from halfstep._autocast.f8.rotate import rotated
from halfstep._policy import Factor
from halfstep.quant._scaled import (
    Blocks,
    Scaled,
    read_blocks,
    write,
    write_blocks,
)

Written = Scaled | Blocks | jax.Array
"""A factor in 8 or 4 bits; an array if its leg is not quantized."""


def written(
    value: jax.Array,
    factor: Factor | None,
    roles: Roles,
    *,
    scale: jax.Array | None = None,
    key: jax.Array | None = None,
    rotation: jax.Array | None = None,
    compute: np.dtype,
) -> Written:
    """Encode a factor for a leg.

    Args:
        value: The factor.
        factor: How it is encoded; `None` casts it to the compute dtype.
        roles: The roles of its dimensions on that leg.
        scale: The scale of the whole tensor, if it is given.
        key: The key for stochastic rounding.
        rotation: The key with which both factors of the leg are rotated.
        compute: The dtype of legs that are not quantized.
    """
    if factor is None:
        return value.astype(compute)
    if not factor.is_blocked:
        return write(value, factor, summed=roles.summed, scale=scale, key=key)
    rows = as_rows(value, roles)
    if factor.rotate and rotation is not None:
        rows = rotated(rows, factor.size, key=rotation)
    return write_blocks(rows, factor, key=key)


def read(
    array: Written,
    factor: Factor | None,
    roles: Roles,
    shape: Sequence[Any],
    compute: np.dtype,
    *,
    rotation: jax.Array | None = None,
) -> Any:
    """Decode a factor, to the compute dtype and its own shape.

    In bfloat16 this is exact: elements have at most 4 significant bits, and scales are powers of
    two or have 4 significant bits, too.

    Args:
        array: The encoded factor.
        factor: How it is encoded.
        roles: The roles of its dimensions on the leg that it is encoded for.
        shape: Its shape.
        compute: The dtype.
        rotation: The key with which it was rotated, if the rotation is to be undone.
    """
    if isinstance(array, Scaled):
        return (array.elements.astype(jnp.float32) * array.scale).astype(compute)
    if not isinstance(array, Blocks) or factor is None:
        return array
    length = int(np.prod([shape[axis] for axis in roles.summed]))
    rows = read_blocks(array, factor, length=length, dtype=compute)
    if rotation is not None and factor.rotate:
        rows = rotated(rows, factor.size, key=rotation, back=True)
    return from_rows(rows, roles, shape)


def same_on_both(first: Factor | None, second: Factor | None) -> bool:
    """Return whether one encoding serves both legs: it does not depend on dimensions."""
    return first == second and first is not None and first.per == "tensor" and is_exact(first)


def is_exact(factor: Factor) -> bool:
    """Return whether nothing about an encoding is random."""
    return factor.rounding == "nearest" and not factor.rotate


def observed(value: jax.Array, array: Written, factor: Factor | None, roles: Roles) -> jax.Array:
    """Return the largest magnitude, and the fractions saturated and flushed to zero: `[3]`."""
    size = jnp.abs(value)
    amax = jnp.max(size).astype(jnp.float32)
    if factor is None:
        return jnp.stack([amax, jnp.float32(0), jnp.float32(0)])
    saturated = jnp.float32(0)
    if isinstance(array, Scaled):
        beyond = size.astype(jnp.float32) > factor.max * array.scale
        saturated = jnp.mean(beyond, dtype=jnp.float32)
        lost = (array.elements == 0) & (size != 0)
    else:
        if factor.rounding == "stochastic" and isinstance(array, Blocks):
            # XLA would store what is rounded in float32: for the elements, and for this.
            array = array._replace(elements=jax.lax.optimization_barrier(array.elements))
        read_as = read(array, factor, roles, value.shape, np.dtype(jnp.float32), rotation=None)
        lost = (read_as == 0) & (size != 0)
        # An element of a rotated row is a mixture of many: a zero says nothing about any of them.
        if factor.rotate:
            lost = jnp.zeros((), bool)
    return jnp.stack([amax, saturated, jnp.mean(lost, dtype=jnp.float32)])
