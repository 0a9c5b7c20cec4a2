"""Codes of few bits for values of a group, relative to the largest of them."""

import dataclasses
import enum
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import bitcast_convert_type
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Shaped

from halfstep._base import checked

Values = Float32[Array, "..."]


class Curve(enum.Enum):
    """How values are spread over codes."""

    SOFTSIGN = "of both signs, denser near zero: `2x / (1 + |x|)`"
    ROOT = "of a positive value's square root"
    FLOAT = "a float of 8 bits, of both signs"
    ROOT_FLOAT = "a float of 8 bits, of a positive value's square root"


@dataclasses.dataclass(frozen=True)
class Code:
    """One way to write values of a group in few bits.

    A group has a scale: the largest magnitude in it, rounded up, so that no code is out of range.
    In a code of roots no value gets the code of zero, however much larger its neighbors are: a
    second moment of zero would let its parameter step by thousands of learning rates.

    Scales may be as large as `2**126`. What is so small that float32 holds it as a denormal number
    is zero where the hardware takes those for zero.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import quant

        code = quant.CODES["int8"]
        assert (code.bits, code.limit, code.is_root) == (8, 127, False)
        value, scale = jnp.array([-4.0, 0.01, 4.0]), jnp.float32(4)
        codes = code.encode(value, scale)
        assert codes.tolist() == [-127, 1, 127]
        assert jnp.allclose(code.decode(codes, scale), value, atol=0.01)
        ```
    """

    name: str
    curve: Curve
    dtype: np.dtype
    """Of the stored array."""
    limit: int
    """The largest code."""
    bits: int = 8

    @property
    def is_root(self) -> bool:
        """Whether the values are not negative and their square root is what is coded."""
        return self.curve in (Curve.ROOT, Curve.ROOT_FLOAT)

    @checked
    def encode(
        self,
        value: Values,
        scale: Values,
        *,
        noise: Values | None = None,
        nearest: Callable[[Any], Any] = jnp.round,
    ) -> Shaped[Array, "..."]:
        """Return the codes of values.

        Args:
            value: The values; of a code of roots, their square roots.
            scale: At least the largest magnitude of its group, for every value.
            noise: Of [0, 1), for every value: codes are then rounded up or down at random, with
                the probability that makes the mean of what they decode to right; of a code of
                roots, the mean of its square. Nearest without it, and always for floats.
            nearest: Rounds to the nearest, for kernels whose language has no `jnp.round`.
        """
        if self.curve in (Curve.FLOAT, Curve.ROOT_FLOAT):
            return self._encode_float(value, scale)
        if self.curve is Curve.SOFTSIGN:
            # With x = value / scale, 2x / (1 + |x|): one division.
            total = jnp.maximum(scale + jnp.abs(value), _TINY)
            position = 2 * self.limit * (value / total)
            return self._signed(position, noise, nearest).astype(self.stored)
        # No value gets the code 0, see the class: clipped from below at 1.
        position = value * (self.limit / jnp.maximum(scale, _TINY_ROOT))
        return jnp.clip(_root(position, noise, nearest), 1, self.limit).astype(self.stored)

    @checked
    def decode(self, codes: Shaped[Array, "..."], scale: Values) -> Values:
        """Return the values of codes; for a code of roots, the square roots of the values."""
        position = codes.astype(jnp.float32)
        if self.curve is Curve.SOFTSIGN:
            return scale * (position / (2 * self.limit - jnp.abs(position)))
        if self.curve is Curve.FLOAT:
            # Not a share of the scale first: that of a small one would be none.
            return scale * (position * (1 / self.limit))
        return position * (scale * (1 / self.limit))

    @property
    def stored(self) -> Any:
        """The dtype of codes before they are packed."""
        if self.bits == 8:
            return self.dtype
        return jnp.int8 if self.curve is Curve.SOFTSIGN else jnp.uint8

    def _signed(
        self, position: Values, noise: Values | None, nearest: Callable[[Any], Any]
    ) -> Values:
        if noise is None:
            return nearest(position)
        size = jnp.abs(position)
        below = jnp.floor(size)
        # How far the value is on its way between those of two codes, x = size / (2 limit - size).
        chance = (size - below) * (2 * self.limit - 1 - below) / (2 * self.limit - size)
        return jnp.copysign(jnp.where(noise < chance, below + 1, below), position)

    def _encode_float(self, value: Values, scale: Values) -> Shaped[Array, "..."]:
        position = self.limit * (value / jnp.maximum(scale, _TINY))
        position = jnp.clip(position, -self.limit, self.limit)
        if self.is_root:
            position = jnp.maximum(position, float(jnp.finfo(self.dtype).smallest_subnormal))
        return position.astype(self.dtype)


# Divisors in place of a scale of zero. No scale of a group that is not all zeros is below them, and
# the quotient is finite. The square root of a normal number is far above `_TINY`; `_TINY_ROOT` is
# larger, so that its reciprocal, times the limit of a code, is finite as well.
_TINY = float(np.finfo(np.float32).tiny)
_TINY_ROOT = 2.0**-100

_FLOAT8 = np.dtype(jnp.float8_e4m3fn)
CODES = MappingProxyType(
    {
        code.name: code
        for code in (
            Code("int8", Curve.SOFTSIGN, np.dtype(np.int8), 127),
            Code("root8", Curve.ROOT, np.dtype(np.uint8), 255),
            Code("int4", Curve.SOFTSIGN, np.dtype(np.uint8), 7, bits=4),
            Code("root4", Curve.ROOT, np.dtype(np.uint8), 15, bits=4),
            Code("f8", Curve.FLOAT, _FLOAT8, 448),
            Code("rootf8", Curve.ROOT_FLOAT, _FLOAT8, 448),
        )
    }
)
"""All codes, by name."""


def as_code(code: str | Code) -> Code:
    """Return a code by its name, or itself."""
    if isinstance(code, Code):
        return code
    if code not in CODES:
        raise ValueError(f"a code must be one of {', '.join(CODES)}; got {code!r}")
    return CODES[code]


def as_scale_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of scales.

    Raises:
        ValueError: If scales cannot be of it.
    """
    found = np.dtype(dtype)
    if found not in (np.dtype(jnp.bfloat16), np.dtype(np.float32)):
        raise ValueError(f"scale_dtype must be bfloat16 or float32; got {found.name}.")
    return found


def scale_of(magnitude: Values, dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Return the scale for a largest magnitude: rounded up to bfloat16, or as it is."""
    if np.dtype(dtype) == np.float32:
        return magnitude
    # Rounded up, by adding all bits that are cut off: no value of the group may be above its scale.
    # The last NaNs would be carried into the sign; they become the one before. The minimum is of
    # signed integers, which Mosaic TPU has.
    word = jnp.minimum(bitcast_convert_type(magnitude, jnp.int32), 0x7FFF0000)
    high = (bitcast_convert_type(word, jnp.uint32) + 0xFFFF) >> 16
    return bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)


def _root(position: Values, noise: Values | None, nearest: Callable[[Any], Any]) -> Values:
    if noise is None:
        return nearest(position)
    below = jnp.floor(position)
    # How far the square is on its way between those of two codes. If roots were right on average,
    # squares would be too large, and in a moment that is kept for many steps it adds up.
    chance = (position - below) * (position + below) / (2 * below + 1)
    return jnp.where(noise < chance, below + 1, below)
