"""Flag values that are not finite: all that a search needs, at a fraction of what numbers cost.

The search for the first non-finite value needs two bits of every operation's result: whether it has
a NaN, and whether it has an infinity. Recording all numbers of every result makes a program with 20
times as many instructions, and compiling it takes about 10 times as long.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep.debug._instrument.stats import (
    EMPTY,
    Column,
    Counted,
    Measure,
    bits_of,
    magnitude,
    real,
)

_BITS = 2
_WORD = 32 // _BITS


@dataclasses.dataclass(frozen=True)
class Flags(Measure):
    """Rows that say only whether a value is finite, has an infinity, or has a NaN.

    Values of the same shape are flagged in one word per element, two bits per value, and the words
    are reduced by OR. So one reduction covers up to 16 values, and XLA computes a chain of
    elementwise operations and its flags in one fusion. A reduction for each value would give each
    operation a kernel of its own.
    """

    packed: bool
    """Whether values share a reduction. XLA has no OR of integers over devices, so it is false for
    a program on several devices."""

    def of(self, value: jax.Array, place: Any) -> jax.Array:
        """Keep the value: it is flagged together with others."""
        del place
        return value

    def rows(self, measured: Sequence[Any], loops: int) -> jax.Array:
        """Flag the values, and fill the columns for the rest with those of an unknown value."""
        flags = self._packed(measured) if self.packed else _one_by_one(measured)
        columns = [jnp.full(len(measured), x, jnp.float32) for x in EMPTY + (-1.0,) * loops]
        columns[Column.ABSMAX], columns[Column.BAD] = _columns(flags)
        return jnp.stack(columns, axis=1)

    def _packed(self, values: Sequence[jax.Array]) -> jax.Array:
        words: list[jax.Array] = []
        places: list[tuple[int, int]] = []
        filling: dict[Any, int] = {}
        used: list[int] = []
        for value in map(real, values):
            # Only arrays that are laid out alike can be combined without moving them.
            aval = jax.typeof(value)
            key = (value.shape, getattr(aval, "sharding", None), getattr(aval, "vma", None))
            group = filling.get(key)
            if group is None or used[group] == _WORD:
                group = filling[key] = len(words)
                words.append(_flags(value, 0))
                used.append(0)
            else:
                words[group] |= _flags(value, used[group])
            places.append((group, used[group]))
            used[group] += 1
        if not values:
            return jnp.zeros(0, jnp.uint32)
        reduced = [
            jax.lax.reduce(word, np.uint32(0), jax.lax.bitwise_or, tuple(range(word.ndim)))
            for word in words
        ]
        # Shifted one by one: a function that is recomputed may not have constant arrays, such as
        # the indices that would put all flags into order at once.
        found = [reduced[group] >> np.uint32(place * _BITS) for group, place in places]
        return jnp.stack(found) & np.uint32(2**_BITS - 1)


def flag(value: jax.Array) -> Counted:
    """Return the numbers of one value, as far as flags tell them."""
    largest, bad = _columns(_one_by_one([value])[0])
    infinite, none = bits_of(np.inf, np.dtype(np.float32)), np.int32(0)
    detail = (np.float32(np.inf), np.float32(-np.inf), none)
    bits = jax.lax.bitcast_convert_type(largest, jnp.uint32)
    return Counted((bits, infinite), (bad.astype(jnp.int32), none, none), value.size, detail)


def _columns(flags: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitudes, as far as they are known, and how many are not finite."""
    infinite = jnp.where(flags > 0, np.float32(np.inf), np.float32(0))
    return jnp.where(flags > 1, np.float32(np.nan), infinite), (flags > 0).astype(jnp.float32)


def _flags(value: jax.Array, place: int) -> jax.Array:
    """Return for each element its two bits, at a place in a word."""
    bits, infinite = magnitude(value), bits_of(np.inf, value.dtype)
    shift = np.uint32(place * _BITS)
    is_nan = jnp.where(bits > infinite, np.uint32(3) << shift, np.uint32(1) << shift)
    return jnp.where(bits >= infinite, is_nan, np.uint32(0))


def _one_by_one(values: Sequence[jax.Array]) -> jax.Array:
    found = [jnp.max(_flags(real(value), 0), initial=np.uint32(0)) for value in values]
    return jnp.stack(found) if found else jnp.zeros(0, jnp.uint32)
