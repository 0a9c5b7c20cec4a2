"""How far two values are apart: a row of sums, which add up over turns and shards."""

from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Sum(IntEnum):
    """The numbers of a row, by position."""

    ABSMAX = 0
    """The largest magnitude of both, by which both are divided; -1 where nothing was computed."""
    DIFFERENCE = 1
    """The sum of the squares of the differences."""
    WIDE = 2
    """The sum of the squares in float32."""
    LOW = 3
    """The sum of the squares in the policy."""
    PRODUCT = 4
    """The sum of the products of both."""
    BAD = 5
    """How many elements are finite in one and not in the other, or not finite in another way."""


ABSENT = (-1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Distance(NamedTuple):
    """How far two values are apart: relative error, cosine, and elements that one lost.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        report = halfstep.debug.compare(lambda w: w * 1e5, "f16,op:*=compute")(jnp.ones(3))
        # Larger than float16 can hold: finite in float32, and infinite here.
        assert isinstance(report.results, halfstep.debug.Distance)
        assert report.results.error == float("inf") and report.results.bad == 3
        ```
    """

    error: float
    cosine: float
    bad: int


def sums(low: Any, wide: Any) -> jax.Array:
    """The row of two values of one shape."""
    low, wide = _flat(low), _flat(wide)
    both = jnp.isfinite(low) & jnp.isfinite(wide)
    same = (low == wide) | (jnp.isnan(low) & jnp.isnan(wide))
    bad = jnp.sum(~both & ~same, dtype=jnp.float32)
    low, wide = jnp.where(both, low, 0), jnp.where(both, wide, 0)
    largest = jnp.maximum(jnp.max(jnp.abs(low)), jnp.max(jnp.abs(wide)))
    # Squares of 1e-25 are zero, and those of 1e25 infinite.
    unit = jnp.where(largest > 0, largest, 1)
    low, wide = low / unit, wide / unit
    made = [(low - wide) ** 2, wide**2, low**2, low * wide]
    return jnp.stack([largest, *map(jnp.sum, made), bad])


def _flat(value: Any) -> jax.Array:
    value = jnp.ravel(jnp.asarray(value))
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.concatenate([value.real, value.imag])
    return value.astype(jnp.float32)


def absent(shape: tuple[int, ...]) -> jax.Array:
    """Rows of what was not computed."""
    columns = [jnp.full((*shape[:-1], 1), number, jnp.float32) for number in ABSENT]
    return jnp.concatenate(columns, axis=-1)


def added(rows: Any) -> Any:
    """Rows of turns or shards as one: `[n, ..., columns]` to `[..., columns]`."""
    library = np if isinstance(rows, np.ndarray) else jnp
    sizes = rows[..., : Sum.ABSMAX + 1]
    largest = library.max(sizes, axis=0, keepdims=True)
    unit = library.where(largest > 0, largest, 1)
    factor = (library.maximum(sizes, 0) / unit) ** 2
    squares = library.sum(rows[..., Sum.DIFFERENCE : Sum.BAD] * factor, axis=0)
    bad = library.sum(rows[..., Sum.BAD :], axis=0)
    return library.concatenate([largest[0], squares, bad], axis=-1)


def was_computed(rows: np.ndarray) -> bool:
    """Whether rows say anything."""
    return bool((rows[..., Sum.ABSMAX] >= 0).any())


def distance(rows: Any) -> Distance:
    """What rows say together; what was not computed is not off."""
    rows = np.asarray(rows, np.float64).reshape(-1, len(Sum))
    if not was_computed(rows):
        return Distance(0.0, 1.0, 0)
    row = added(rows)
    apart, wide, low = row[Sum.DIFFERENCE], row[Sum.WIDE], row[Sum.LOW]
    bad = int(row[Sum.BAD])
    if bad:
        return Distance(float("inf"), 0.0, bad)
    if not wide:
        return Distance(float("inf") if apart else 0.0, 0.0 if apart else 1.0, 0)
    error = float(np.sqrt(apart / wide))
    cosine = float(row[Sum.PRODUCT] / np.sqrt(wide * low)) if low else 0.0
    return Distance(error, min(cosine, 1.0), 0)
