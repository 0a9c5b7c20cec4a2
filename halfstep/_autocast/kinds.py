"""Describe what is known about a value's precision before anything runs."""

import enum
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue
from jax.ref import AbstractRef
from jax.typing import ArrayLike


class Kind(enum.IntEnum):
    """How a value takes part in the choice of precision, from yielding to demanding.

    `LOW` and `STORED` values are held in the compute dtype, all others as traced (float32).
    `OTHER` values (integers, the user's own 16-bit floats, complex numbers, keys) stay as they are.
    """

    # The order is part of the meaning. A result that is made of several values has the largest kind
    # among them (`join` is `max`), so a kind that demands more has a larger number.
    OTHER = 0
    SOFT = 1
    """A constant, or a value made of parameters: takes the dtype of whatever it meets."""
    PARAM = 2
    """A parameter itself. Like `SOFT`, but a loop that updates it carries it in float32."""
    STORED = 3
    """A parameter that is stored in the compute dtype."""
    LOW = 4
    """A value in the compute dtype."""
    WIDE = 5
    """A value in float32. Values made of it are float32, too, until it enters a contraction."""
    KEPT = 6
    """A value in float32 because the user says so. A contraction of it is float32, too."""

    @property
    def yields(self) -> bool:
        """Whether the value takes the dtype of whatever it meets."""
        return self in (Kind.SOFT, Kind.PARAM)

    @property
    def is_low(self) -> bool:
        """Whether the value is held in the compute dtype."""
        return self in (Kind.STORED, Kind.LOW)

    @property
    def is_weight(self) -> bool:
        """Whether the value is a parameter, or made of parameters and constants only."""
        return self.yields or self is Kind.STORED


def join(kinds: Iterable[Kind]) -> Kind:
    """Return the kind of a value that may be any of these."""
    return max(kinds, default=Kind.OTHER)


def carried(before: Kind, after: Kind) -> Kind:
    """Return the kind of a loop's carry that comes in as one kind and goes on as another."""
    if before is Kind.PARAM and after not in (Kind.PARAM, Kind.KEPT):
        # Steps that are small compared with a parameter would be lost in 16 bits.
        return Kind.WIDE
    return join((before, after))


def is_subject(aval: AbstractValue, compute: np.dtype) -> bool:
    """Return whether autocast chooses the precision of a value of this type.

    A `Ref` is a place, not a value: its contents stay as they were made.
    """
    is_float32 = getattr(aval, "dtype", None) == np.dtype(np.float32)
    return is_float32 and compute.itemsize < 4 and not isinstance(aval, AbstractRef)


def constant_kind(value: ArrayLike, compute: np.dtype) -> Kind:
    """Return `WIDE` for a constant that the compute dtype cannot hold, and `SOFT` otherwise.

    Rounding does not matter. A constant that would become infinite (`-1e9` in float16) or vanish
    (an epsilon of `1e-8`) is wide, and so is what it is added to.
    """
    limits = jnp.finfo(compute)
    sizes = np.abs(np.asarray(value, np.float64))
    finite = sizes[np.isfinite(sizes) & (sizes > 0)]
    if finite.size and (finite.max() > float(limits.max) or finite.min() < float(limits.tiny)):
        return Kind.WIDE
    return Kind.SOFT
