"""Measure how far apart two values are, as sums that add up over iterations and shards."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

Array = np.ndarray | jax.Array
Rows = TypeVar("Rows", np.ndarray, jax.Array)


class Sum(IntEnum):
    """The numbers of a row, by position."""

    ABSMAX = 0
    """The largest magnitude, by which both values are divided; -1 where nothing was computed."""
    DIFFERENCE = 1
    """The sum of the squares of the differences."""
    WIDE = 2
    """The sum of the squares in float32."""
    LOW = 3
    """The sum of the squares in the policy."""
    PRODUCT = 4
    """The sum of the products of both values."""
    BAD = 5
    """How many elements are finite in only one value, or not finite in different ways."""


ABSENT = (-1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Distance(NamedTuple):
    """How far apart two values are: relative error, cosine, and elements that one of them lost.

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


def sums(policy_value: ArrayLike, float32_value: ArrayLike) -> jax.Array:
    """Compute the row of two values of the same shape."""
    low, wide = _flat(policy_value), _flat(float32_value)
    # An infinity in both values is not an error. An infinity in only one of them is counted in
    # `bad` and kept out of the sums, which would lose all other elements to it.
    both = jnp.isfinite(low) & jnp.isfinite(wide)
    same = (low == wide) | (jnp.isnan(low) & jnp.isnan(wide))
    bad = jnp.sum(~both & ~same, dtype=jnp.float32)
    low, wide = jnp.where(both, low, 0), jnp.where(both, wide, 0)
    largest = jnp.maximum(jnp.max(jnp.abs(low)), jnp.max(jnp.abs(wide)))
    # In float32 the square of 1e-25 is zero and the square of 1e25 is infinite, so both values are
    # divided by the largest magnitude first.
    unit = jnp.where(largest > 0, largest, 1)
    low, wide = low / unit, wide / unit
    made = [(low - wide) ** 2, wide**2, low**2, low * wide]
    return jnp.stack([largest, *map(jnp.sum, made), bad])


def _flat(value: ArrayLike) -> jax.Array:
    flat = jnp.ravel(jnp.asarray(value))
    if jnp.issubdtype(flat.dtype, jnp.complexfloating):
        flat = jnp.concatenate([flat.real, flat.imag])
    return flat.astype(jnp.float32)


def absent(shape: tuple[int, ...]) -> jax.Array:
    """Return rows for values that were not computed."""
    columns = [jnp.full((*shape[:-1], 1), number, jnp.float32) for number in ABSENT]
    return jnp.concatenate(columns, axis=-1)


def added(rows: Rows) -> Rows:
    """Add the rows of iterations or shards: `[n, ..., columns]` to `[..., columns]`."""
    # Programs add rows with JAX; the host adds them with NumPy, in float64.
    library: Any = np if isinstance(rows, np.ndarray) else jnp
    sizes = rows[..., : Sum.ABSMAX + 1]
    largest = library.max(sizes, axis=0, keepdims=True)
    unit = library.where(largest > 0, largest, 1)
    # Each row has its own unit (`ABSMAX`), so its sums of squares are rescaled to the common one.
    factor = (library.maximum(sizes, 0) / unit) ** 2
    squares = library.sum(rows[..., Sum.DIFFERENCE : Sum.BAD] * factor, axis=0)
    bad = library.sum(rows[..., Sum.BAD :], axis=0)
    return library.concatenate([largest[0], squares, bad], axis=-1)


def was_computed(rows: np.ndarray) -> bool:
    """Return whether any row is of a value that was computed."""
    return bool((rows[..., Sum.ABSMAX] >= 0).any())


def distance(rows: Array | Sequence[Array | Sequence[float]]) -> Distance:
    """Compute the distance of all rows together; values that were not computed have no error."""
    every = np.asarray(rows, np.float64).reshape(-1, len(Sum))
    if not was_computed(every):
        return Distance(0.0, 1.0, 0)
    row = added(every)
    apart, wide, low = row[Sum.DIFFERENCE], row[Sum.WIDE], row[Sum.LOW]
    bad = int(row[Sum.BAD])
    # One element that is finite in only one of the values makes the error infinite, no matter how
    # small the other errors are.
    if bad:
        return Distance(float("inf"), 0.0, bad)
    if not wide:
        return Distance(float("inf") if apart else 0.0, 0.0 if apart else 1.0, 0)
    error = float(np.sqrt(apart / wide))
    cosine = float(row[Sum.PRODUCT] / np.sqrt(wide * low)) if low else 0.0
    # Rounding may push the cosine of equal values above 1.
    return Distance(error, min(cosine, 1.0), 0)
