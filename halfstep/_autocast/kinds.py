"""What is known about a value's precision before anything runs."""

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

    # The order is part of the meaning: what is made of several values is of the largest kind among
    # them (`join` is `max`), so a kind that demands more has a larger number.
    OTHER = 0
    SOFT = 1
    """A constant, or what is made of parameters: goes along with whatever it meets."""
    PARAM = 2
    """A parameter itself. The same, but where a loop updates it, it is carried in float32."""
    STORED = 3
    """A parameter that is stored in the compute dtype."""
    LOW = 4
    """In the compute dtype."""
    WIDE = 5
    """In float32, and so is what is made of it, until it enters a contraction."""
    KEPT = 6
    """In float32 because the user says so, and so is a contraction that it enters."""

    @property
    def yields(self) -> bool:
        """Whether it goes along with whatever it meets."""
        return self in (Kind.SOFT, Kind.PARAM)

    @property
    def is_low(self) -> bool:
        """Whether it is held in the compute dtype."""
        return self in (Kind.STORED, Kind.LOW)

    @property
    def is_weight(self) -> bool:
        """Whether it is a parameter, or made of parameters and constants only."""
        return self.yields or self is Kind.STORED


def join(kinds: Iterable[Kind]) -> Kind:
    """The kind of a value that is any of these."""
    return max(kinds, default=Kind.OTHER)


def carried(before: Kind, after: Kind) -> Kind:
    """The kind of a loop's carry that comes in as one kind and goes on as another."""
    if before is Kind.PARAM and after not in (Kind.PARAM, Kind.KEPT):
        # Steps that are small beside a parameter would be lost in 16 bits.
        return Kind.WIDE
    return join((before, after))


def is_subject(aval: AbstractValue, compute: np.dtype) -> bool:
    """Whether a value of this type is one whose precision is ours to choose.

    A `Ref` is a place and no value: what it holds stays as it was made.
    """
    is_float32 = getattr(aval, "dtype", None) == np.dtype(np.float32)
    return is_float32 and compute.itemsize < 4 and not isinstance(aval, AbstractRef)


def constant_kind(value: ArrayLike, compute: np.dtype) -> Kind:
    """Whether a constant can be written in the compute dtype without becoming another number.

    Rounding is no matter. A constant that would become infinite (`-1e9` in float16) or vanish (an
    epsilon of `1e-8`) is wide, and so is what it is added to.
    """
    limits = jnp.finfo(compute)
    sizes = np.abs(np.asarray(value, np.float64))
    finite = sizes[np.isfinite(sizes) & (sizes > 0)]
    if finite.size and (finite.max() > float(limits.max) or finite.min() < float(limits.tiny)):
        return Kind.WIDE
    return Kind.SOFT
