"""The optimizers' rules on float32 values, and their arguments. Every backend runs these rules."""

import dataclasses
from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from halfstep.quant._codes import CODES, Code
from halfstep.quant._groups import Groups

Algorithm = Literal["adam", "lion", "sgd"]


@runtime_checkable
class HasType(Protocol):
    """A value with a shape and a dtype: an array, a reference to one, or the type of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The lengths of its axes."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """The dtype of its elements."""
        ...


class Leaf(NamedTuple):
    """A parameter and all that an optimizer stores for it. Unused fields are `None`."""

    param: Any
    """The parameter that models compute with: bfloat16 if `low` has the rest, or any float."""
    low: Any
    """The bits that a bfloat16 parameter lacks: 8 or 16 of them."""
    first: Any
    """Codes of the first moment, or of the momentum."""
    first_scale: Any
    second: Any
    """Codes of the second moment."""
    second_scale: Any

    @property
    def present(self) -> tuple[int, ...]:
        """The indices of the fields that are not `None`."""
        return tuple(i for i, array in enumerate(self) if array is not None)


def leaf_of(present: Sequence[int], arrays: Iterable[Any]) -> Leaf:
    """Make a leaf from the arrays of its present fields."""
    fields = dict(zip(present, arrays, strict=True))
    return Leaf(*(fields.get(i) for i in range(len(Leaf._fields))))


class Scalars(NamedTuple):
    """The values that change from step to step. All are float32 scalars, traced or not."""

    rate: Any
    """The learning rate."""
    b1: Any
    b2: Any
    eps: Any
    decay: Any
    """Decoupled weight decay; a multiple of the learning rate."""
    first_bias: Any
    """`1 / (1 - b1**t)`."""
    second_bias: Any
    """`1 / sqrt(1 - b2**t)`."""
    keep: Any
    """0 if nothing may change, because a gradient is not finite; otherwise 1."""
    seed: Any
    """The seed of random rounding: an integer below 2**24."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """The settings of an update that the arrays do not determine."""

    algorithm: Algorithm
    groups: Groups
    nesterov: bool = False
    first_code: str = "int8"
    second_code: str = "root8"
    stochastic: bool = False
    """Whether the second moment and a split of 8 bits are rounded at random. Codes of 4 bits always
    are."""
    coupled: bool = False
    """Whether weight decay is added to the gradient and not to the step."""

    @property
    def is_random(self) -> bool:
        """Whether anything is rounded at random."""
        return self.stochastic or 4 in (self.first.bits, self.second.bits)

    @property
    def packed(self) -> tuple[int, ...]:
        """The indices of the fields of a leaf in which two codes share a byte."""
        fields = zip(("first", "second"), (self.first, self.second), strict=True)
        return tuple(Leaf._fields.index(name) for name, code in fields if code.bits == 4)

    @property
    def first(self) -> Code:
        """The code of the first moment."""
        return CODES[self.first_code]

    @property
    def second(self) -> Code:
        """The code of the second moment."""
        return CODES[self.second_code]


class Moments(NamedTuple):
    """A leaf's values in float32, while they are updated."""

    value: Any
    first: Any
    second: Any
    root: Any = None
    """The square root of the second moment, after a step."""


def updated(old: Moments, grad: jax.Array, by: Scalars, spec: Spec) -> Moments:
    """Return the values after one step.

    Args:
        old: The values before the step.
        grad: The gradient, in float32.
        by: The hyperparameters of this step.
        spec: The optimizer.
    """
    if spec.coupled:
        grad, by = grad + by.decay * old.value, by._replace(decay=0)
    # An element whose gradient is not finite stays as it is. One such value in a group's maximum
    # would make the scale NaN, and with it all 32 moments of the group permanently.
    is_finite = jnp.abs(grad) <= float(jnp.finfo(jnp.float32).max)
    new = _RULES[spec.algorithm](old, jnp.where(is_finite, grad, 0), by, spec)
    value = jnp.where(is_finite, new.value, old.value)
    return Moments(value, new.first, new.second, new.root)


def _adam(old: Moments, grad: jax.Array, by: Scalars, spec: Spec) -> Moments:
    del spec
    first = by.b1 * old.first + (1 - by.b1) * grad
    second = by.b2 * old.second + (1 - by.b2) * _square(grad)
    # The root is computed once: the step divides by it, and `root8` codes it.
    root = jnp.sqrt(second)
    step = (first * by.first_bias) / (root * by.second_bias + by.eps)
    return Moments(_stepped(old.value, step, by), first, second, root)


def _lion(old: Moments, grad: jax.Array, by: Scalars, spec: Spec) -> Moments:
    del spec
    step = _sign(by.b1 * old.first + (1 - by.b1) * grad)
    first = by.b2 * old.first + (1 - by.b2) * grad
    return Moments(_stepped(old.value, step, by), first, None)


def _sgd(old: Moments, grad: jax.Array, by: Scalars, spec: Spec) -> Moments:
    if old.first is None:
        return Moments(_stepped(old.value, grad, by), None, None)
    first = by.b1 * old.first + grad
    step = by.b1 * first + grad if spec.nesterov else first
    return Moments(_stepped(old.value, step, by), first, None)


def _square(grad: jax.Array) -> jax.Array:
    # The second moment of a complex gradient is that of its magnitude, which is real.
    return grad.real**2 + grad.imag**2 if jnp.iscomplexobj(grad) else grad * grad


def _sign(step: jax.Array) -> jax.Array:
    # Not `jnp.sign`: it queries the TPU, which fails when only compiling.
    if jnp.iscomplexobj(step):
        return jnp.sign(step)
    return (step > 0).astype(step.dtype) - (step < 0).astype(step.dtype)


def _stepped(value: jax.Array, step: jax.Array, by: Scalars) -> jax.Array:
    return value - by.rate * (step + by.decay * value)


def noise(shape: tuple[int, ...], seed: jax.Array, *, stream: int) -> jax.Array:
    """Return random 32-bit words, one per element: a hash of its position and the seed.

    It is a hash and not `jax.random`, because words that are computed where they are used cost no
    memory, and every kernel can compute them for its own part of an array. `stream` separates the
    words of one purpose from those of another.
    """
    at = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        at = at * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return hashed(at, seed, stream=stream)


def hashed(at: jax.Array, seed: jax.Array, *, stream: int) -> jax.Array:
    """Return the words of `noise` at given positions, for a kernel that has a part of an array."""
    # The finalizer of Chris Wellons' "lowbias32", found by a search for low bias over all inputs.
    word = at * jnp.uint32(0x9E3779B9) + seed.astype(jnp.uint32) * jnp.uint32(2 * stream + 1)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ (word >> shift)) * jnp.uint32(factor)
    return word ^ (word >> 16)


_RULES = MappingProxyType({"adam": _adam, "lion": _lion, "sgd": _sgd})
