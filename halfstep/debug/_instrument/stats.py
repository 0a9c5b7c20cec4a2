"""Reduce a value to the row of numbers that is recorded for it."""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue
from jax.ref import AbstractRef


class Column(IntEnum):
    """The numbers of a row, by position."""

    ABSMAX = 0
    """The largest magnitude; infinite or NaN if any element is. -1 where nothing was computed."""
    SMALLEST = 1
    """The smallest magnitude that is not zero; infinite if all elements are zero."""
    BAD = 2
    """How many elements are not finite."""
    BELOW = 3
    """The share of elements that are not zero and below the compute dtype's smallest normal."""
    ABOVE = 4
    """The share of finite elements above the compute dtype's largest."""
    LOW = 5
    """The smallest finite element; NaN if detail was not requested."""
    HIGH = 6
    """The largest finite element; NaN if detail was not requested."""
    ZEROS = 7
    """How many elements are zero; NaN if detail was not requested."""
    SHARD = 8
    """The first shard of a `shard_map` with elements that are not finite; else -1."""
    TURN = 9
    """The first iteration of the outermost loop with such elements; else -1. Inner loops follow."""


# XLA:CPU reduces an array to one number on a single core. So the leading axes, enough of them for
# this many rows, are kept in a first reduction, which runs on all cores.
_PARTS = 8

# The row of a value that was not computed. It is neutral for the maxima, minima and sums of rows.
EMPTY = (-1.0, math.inf, 0.0, 0.0, 0.0, math.inf, -math.inf, 0.0, -1.0)


def is_recorded(aval: AbstractValue | jax.ShapeDtypeStruct) -> bool:
    """Return whether a value has anything to record: it is floating point or complex."""
    if isinstance(aval, AbstractRef):  # A place, not a value: what is read from it is recorded.
        return False
    dtype, shape = getattr(aval, "dtype", None), getattr(aval, "shape", ())
    return dtype is not None and bool(math.prod(shape)) and jnp.issubdtype(dtype, jnp.inexact)


Reduction = tuple[jax.Array, Any, Callable[[Any, Any], Any]]
"""An array, the number that a reduction starts from, and the function that merges two numbers."""


class Counted(NamedTuple):
    """The numbers of one value as they come out of its reduction.

    Numbers of a single value are not converted, because each conversion would be a kernel of its
    own, and starting it takes longer than running it. `as_rows` converts the numbers of many values
    at once.
    """

    magnitudes: tuple[Any, Any]
    """The largest and the smallest magnitude, as the bits of a float32."""
    counts: tuple[Any, Any, Any]
    """How many elements are not finite, below the range of the compute dtype, and above it."""
    size: int
    detail: tuple[Any, ...] = ()
    """The smallest and the largest element and the number of zeros, if requested."""


class Measure(abc.ABC):
    """How the values of sites become rows."""

    @abc.abstractmethod
    def of(self, value: jax.Array, place: Any) -> Any:
        """Measure a value where the program computes it.

        Args:
            value: Any floating-point array.
            place: The function of the value, and its number there.
        """

    @abc.abstractmethod
    def rows(self, measured: Sequence[Any], loops: int) -> jax.Array:
        """Stack measured values into rows, with one more column per loop."""


@dataclasses.dataclass(frozen=True)
class Numbers(Measure):
    """All numbers of each value."""

    compute: np.dtype
    """The dtype whose range the numbers are compared with."""
    detail: bool = False
    """Whether to fill the optional columns: range and zeros."""

    def of(self, value: jax.Array, place: Any) -> Counted:
        """Compute the numbers of a value."""
        del place
        return numbers(value, self.compute, detail=self.detail)

    def rows(self, measured: Sequence[Any], loops: int) -> jax.Array:
        """Stack the numbers."""
        return as_rows(measured, loops)


def numbers(value: jax.Array, compute: np.dtype, *, detail: bool = False) -> Counted:
    """Compute the numbers of one value.

    Args:
        value: Any floating-point array.
        compute: The dtype whose range the numbers are compared with.
        detail: Whether to compute the range and count the zeros as well.
    """
    value = real(value)
    # As integers, magnitudes keep their order and NaN is above infinity, so one maximum is enough.
    # The stored bits are read, so that XLA cannot use a wider number that was there before.
    bits, dtype = magnitude(value), value.dtype
    if dtype == jnp.bfloat16:
        # The upper half of the bits of a float32.
        bits, dtype = bits.astype(jnp.uint32) << np.uint32(16), np.dtype(np.float32)
    infinite = bits_of(np.inf, dtype)
    low, high = _limits(dtype, compute)
    counted = [bits >= infinite, (bits > 0) & (bits < low), (bits > high) & (bits < infinite)]
    # One pass for all: on a CPU, five passes take ten times as long. Counts are integers because a
    # float32 sum of ones stops at 2^24.
    given = [
        (bits, bits.dtype.type(0), jax.lax.max),
        (jnp.where((bits > 0) & (bits < infinite), bits, infinite), infinite, jax.lax.min),
        *((where.astype(jnp.int32), np.int32(0), jax.lax.add) for where in counted),
    ]
    if detail:
        given += _detail(value, bits, infinite)
    largest, smallest, bad, below, above, *rest = _reduced(given, over_all_cores=not detail)
    magnitudes = _single(largest, dtype), _single(smallest, dtype)
    return Counted(magnitudes, (bad, below, above), bits.size, tuple(rest))


def _detail(value: jax.Array, bits: jax.Array, infinite: np.ndarray) -> list[Reduction]:
    finite = bits < infinite
    above, below = np.asarray(np.inf, value.dtype), np.asarray(-np.inf, value.dtype)
    return [
        (jnp.where(finite, value, above), above, jax.lax.min),
        (jnp.where(finite, value, below), below, jax.lax.max),
        ((bits == 0).astype(jnp.int32), np.int32(0), jax.lax.add),
    ]


def _reduced(given: Sequence[Reduction], *, over_all_cores: bool) -> Sequence[jax.Array]:
    """Reduce some arrays of the same shape to numbers, in one pass."""
    arrays, start, merge = zip(*given, strict=True)

    def both(one: Sequence[Any], other: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(f(x, y) for f, x, y in zip(merge, one, other, strict=True))

    shape = arrays[0].shape
    kept = _leading(shape)
    # A second reduction is more code, which a program that runs once does not repay.
    if over_all_cores and 0 < kept < len(shape):
        arrays = jax.lax.reduce(arrays, start, both, tuple(range(kept, len(shape))))
    return jax.lax.reduce(arrays, start, both, tuple(range(arrays[0].ndim)))


def _leading(shape: Sequence[int]) -> int:
    """Return how many leading axes together have enough elements for all cores."""
    size = 1
    for number, length in enumerate(shape):
        if size >= _PARTS:
            return number
        size *= length
    return len(shape)


def as_rows(values: Sequence[Counted], loops: int) -> jax.Array:
    """Stack the numbers of some values into rows, with one more column per loop."""
    if not values:
        return empty(0, loops)

    def stacked(numbers: Iterable[Any]) -> jax.Array:
        return jnp.stack([*numbers]).astype(jnp.float32)

    magnitudes = [jnp.stack(column) for column in zip(*(v.magnitudes for v in values), strict=True)]
    bad, below, above = map(stacked, zip(*(value.counts for value in values), strict=True))
    share = stacked(np.float32(1 / value.size) for value in values)
    unknown = [np.float32(np.nan)] * 3
    detail = zip(
        *([x.astype(jnp.float32) for x in v.detail] or unknown for v in values), strict=True
    )
    columns = [
        *(jax.lax.bitcast_convert_type(column, jnp.float32) for column in magnitudes),
        *(bad, below * share, above * share),
        *map(stacked, detail),
    ]
    nowhere = jnp.full(len(values), -1, jnp.float32)
    return jnp.stack([*columns, *[nowhere] * (1 + loops)], axis=1)


def empty(sites: int, loops: int) -> jax.Array:
    """Return rows for values that were not computed."""
    # Built number by number: a function that is recomputed may not have constants of its own.
    columns = [jnp.full((sites, 1), number, jnp.float32) for number in EMPTY + (-1.0,) * loops]
    return jnp.concatenate(columns, axis=1)


def combined(rows: jax.Array, where: Column | int) -> jax.Array:
    """Merge the rows of all iterations or shards: `[n, sites, columns]` to `[sites, columns]`.

    For a value that is not finite, the first iteration in which it is not finite counts. The detail
    columns are those of the first iteration in which any value of the function is not finite, if
    there is one.

    Args:
        rows: The rows of at least one iteration or shard.
        where: The column for the first of the `n` with elements that are not finite.
    """
    bad = rows[:, :, Column.BAD] > 0
    first = jnp.argmax(bad, axis=0)
    found = jnp.where(bad.any(axis=0), first.astype(jnp.float32), np.float32(-1))
    any_bad = bad.any(axis=1)
    made = _merged(rows, _ran(rows), any_bad.any(), jnp.argmax(any_bad))
    return made.at[:, where].set(found)


class Turns(NamedTuple):
    """The rows so far of a `while_loop`, which cannot stack the results of its iterations."""

    number: jax.Array
    """How many iterations there were."""
    times: jax.Array
    """In how many iterations each value was computed: a branch may leave it out."""
    rows: jax.Array


def no_turns(sites: int, loops: int) -> Turns:
    """Return the state before the first iteration."""
    return Turns(jnp.int32(0), jnp.zeros(sites, jnp.float32), empty(sites, loops))


def after_turn(before: Turns, now: jax.Array, where: int) -> Turns:
    """Return the state after one more iteration, with the rows of that iteration merged in."""
    is_bad = now[:, Column.BAD] > 0
    turn = before.number.astype(jnp.float32)
    now = now.at[:, where].set(jnp.where(is_bad, turn, np.float32(-1)))
    rows, times = jnp.stack([before.rows, now]), jnp.stack([before.times, _ran(now)])
    bad = rows[:, :, Column.BAD] > 0
    made = _merged(rows, times, bad.any(), jnp.where(bad[0].any(), 0, 1))
    return Turns(before.number + 1, jnp.sum(times, axis=0), made)


def _ran(rows: jax.Array) -> jax.Array:
    """Return 1 for each row of a value that was computed, else 0."""
    return (rows[..., Column.ABSMAX] != -1).astype(jnp.float32)


def _merged(rows: jax.Array, times: jax.Array, any_bad: jax.Array, turn: jax.Array) -> jax.Array:
    """Merge rows; if anything was not finite, the detail columns are those of one iteration.

    Args:
        rows: `[n, sites, columns]`.
        times: `[n, sites]`: how many iterations each row covers.
        any_bad: Whether any value was not finite in any row.
        turn: The first of the `n` in which a value was not finite.
    """
    bad = rows[:, :, Column.BAD] > 0
    # Magnitude and count are of the first iteration in which the value itself is not finite. Range
    # and zeros are of the first iteration in which any value of the function is not finite: they
    # describe the operands of the operation that started it, not what later iterations made of NaN.
    first = jnp.argmax(bad, axis=0)[None, :, None]
    at_first = jnp.take_along_axis(rows, first, axis=0)[0]
    total = jnp.maximum(jnp.sum(times, axis=0), np.float32(1))

    def shares(column: Column) -> jax.Array:
        return jnp.sum(rows[:, :, column] * times, axis=0) / total

    over_all = jnp.stack(
        [
            jnp.max(rows[:, :, Column.ABSMAX], axis=0),
            jnp.min(rows[:, :, Column.SMALLEST], axis=0),
            at_first[:, Column.BAD],
            shares(Column.BELOW),
            shares(Column.ABOVE),
            jnp.min(rows[:, :, Column.LOW], axis=0),
            jnp.max(rows[:, :, Column.HIGH], axis=0),
            jnp.sum(rows[:, :, Column.ZEROS], axis=0),
        ],
        axis=1,
    )
    magnitude = jnp.where(
        at_first[:, Column.BAD] > 0, at_first[:, Column.ABSMAX], over_all[:, Column.ABSMAX]
    )
    own = over_all.at[:, Column.ABSMAX].set(magnitude)
    detail = slice(Column.LOW, Column.SHARD)
    own = own.at[:, detail].set(jnp.where(any_bad, rows[turn][:, detail], own[:, detail]))
    return jnp.concatenate([own, at_first[:, Column.SHARD :]], axis=1)


def real(value: jax.Array) -> jax.Array:
    """Return a value as real numbers of a dtype with an infinity."""
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return jnp.stack([value.real, value.imag])
    # 8-bit and 4-bit formats have no infinity, or encode it differently from the other formats.
    return value.astype(jnp.float32) if value.dtype.itemsize < 2 else value


def _integer(dtype: np.dtype) -> Any:
    return {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[dtype.itemsize]


def magnitude(value: jax.Array) -> jax.Array:
    """Return the bits without the sign: their order is that of magnitudes, and NaN is last."""
    integer = _integer(value.dtype)
    mask = np.array(-1, f"i{value.dtype.itemsize}").view(integer) >> np.array(1, integer)
    return jax.lax.bitcast_convert_type(value, integer) & mask


def bits_of(number: float, dtype: np.dtype) -> np.ndarray:
    """Return the bits of a number in a dtype."""
    return np.asarray(number, dtype).view(_integer(dtype))


def _single(bits: jax.Array, dtype: np.dtype) -> jax.Array:
    """Return the bits of a number as the bits of the same number in float32."""
    if dtype == np.float32:
        return bits
    value = jax.lax.bitcast_convert_type(bits, dtype)
    if dtype.itemsize == 8:
        # Rows are float32, and a finite float64 must not become infinite in them.
        largest = np.asarray(np.finfo(np.float32).max, dtype)
        value = jnp.where(jnp.isfinite(value), jnp.minimum(value, largest), value)
    return jax.lax.bitcast_convert_type(value.astype(jnp.float32), jnp.uint32)


def _limits(dtype: np.dtype, compute: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the bits of the compute dtype's smallest normal number and of its largest."""
    largest = float(jnp.finfo(compute).max)
    # In a dtype of smaller range the limits become zero and infinity: nothing is outside.
    with np.errstate(over="ignore"):
        low, high = bits_of(float(jnp.finfo(compute).tiny), dtype), bits_of(largest, dtype)
    # A dtype with fewer digits may have to round the largest number up.
    rounded_up = float(high.view(dtype)) > largest
    return low, np.asarray(high - high.dtype.type(rounded_up))


@dataclasses.dataclass(frozen=True)
class Range:
    """The recorded numbers of a value.

    Attributes:
        absmax: The largest magnitude; infinite or NaN if any element is.
        smallest: The smallest magnitude that is not zero; infinite if all elements are zero.
        bad: How many elements are not finite.
        low: The smallest finite element; NaN if it was not recorded.
        high: The largest finite element; NaN if it was not recorded.
        zeros: How many elements are zero; NaN if it was not recorded.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        found = halfstep.debug.first_nonfinite(jnp.log, jnp.array([4.0, 0.0, 0.5]))
        given = found.operands[0].range
        assert (given.low, given.high, given.smallest) == (0, 4, 0.5)
        assert given.zeros == 1 and given.bad == 0
        ```
    """

    absmax: float
    smallest: float
    bad: int
    low: float
    high: float
    zeros: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            parts = [f"magnitudes {self.smallest:.3g} to {self.absmax:.3g}"]
        elif self.low > self.high:
            parts = ["nothing finite"]
        else:
            parts = [f"{self.low:.3g} to {self.high:.3g}"]
            if self.zeros:
                parts.append(f"{self.zeros:.0f} zeros")
            if math.isfinite(self.smallest):
                parts.append(f"smallest magnitude {self.smallest:.3g}")
        if self.bad:
            parts.append(f"{self.bad} not finite")
        return ", ".join(parts)


def range_of(row: np.ndarray, *, finite: bool = False) -> Range:
    """Return the numbers of a recorded value; with `finite`, from before it was not finite."""
    largest = np.maximum(abs(row[Column.LOW]), abs(row[Column.HIGH]))
    return Range(
        float(largest if finite else row[Column.ABSMAX]),
        float(row[Column.SMALLEST]),
        0 if finite else int(row[Column.BAD]),
        float(row[Column.LOW]),
        float(row[Column.HIGH]),
        float(row[Column.ZEROS]),
    )
