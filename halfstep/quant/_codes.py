"""Codes of 8 and 4 bits for the values of a group, relative to the largest of them."""

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
    """The ways to spread values over codes."""

    SOFTSIGN = "of both signs, denser near zero: `2x / (1 + |x|)`"
    ROOT = "of a positive value's square root"
    FLOAT = "a float of 8 bits, of both signs"
    ROOT_FLOAT = "a float of 8 bits, of a positive value's square root"


@dataclasses.dataclass(frozen=True)
class Code:
    """One way to write the values of a group in 8 or 4 bits.

    A group has a scale: the largest magnitude in it, rounded up, so that no code is out of range.
    In a code of roots no value gets the code of zero, however much larger its neighbors are: a
    second moment of zero would let its parameter step by thousands of learning rates.

    Scales may be as large as `2**126`. Values that are denormal in float32 become zero on hardware
    that treats denormal numbers as zero.

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
    """The dtype of the stored array."""
    limit: int
    """The largest code."""
    bits: int = 8

    @property
    def is_root(self) -> bool:
        """Whether the square roots of values are coded, which then must not be negative."""
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
            value: The values; for a code of roots, their square roots.
            scale: The scale of each value: at least the largest magnitude of its group.
            noise: Random numbers in [0, 1), one for each value. Codes are then rounded up or down
                at random, with the probability that makes the mean of the decoded values right;
                for a code of roots, the mean of their squares. Without noise, and always for
                floats, codes are rounded to the nearest.
            nearest: Rounds to the nearest, for kernels whose language has no `jnp.round`.
        """
        if self.curve in (Curve.FLOAT, Curve.ROOT_FLOAT):
            return self._encode_float(value, scale)
        if self.curve is Curve.SOFTSIGN:
            # With x = value / scale, 2x / (1 + |x|): one division.
            total = jnp.maximum(scale + jnp.abs(value), _TINY)
            position = 2 * self.limit * (value / total)
            return self._signed(position, noise, nearest).astype(self.stored)
        # Codes are clipped from below at 1, so that no value gets the code 0: see the class.
        position = value * (self.limit / jnp.maximum(scale, _TINY_ROOT))
        return jnp.clip(_root(position, noise, nearest), 1, self.limit).astype(self.stored)

    @checked
    def decode(self, codes: Shaped[Array, "..."], scale: Values) -> Values:
        """Return the values of codes; for a code of roots, the square roots of the values."""
        position = codes.astype(jnp.float32)
        if self.curve is Curve.SOFTSIGN:
            return scale * (position / (2 * self.limit - jnp.abs(position)))
        if self.curve is Curve.FLOAT:
            # Divide the position by the limit and not the scale: a small scale would become zero.
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
        below = _floor(size)
        # The chance to round up is the value's place between the values of the two nearest codes,
        # where a code of that size stands for x = size / (2 limit - size).
        chance = (size - below) * (2 * self.limit - 1 - below) / (2 * self.limit - size)
        rounded = jnp.where(noise < chance, below + 1, below)
        return jnp.where(position < 0, -rounded, rounded)

    def _encode_float(self, value: Values, scale: Values) -> Shaped[Array, "..."]:
        position = self.limit * (value / jnp.maximum(scale, _TINY))
        position = jnp.clip(position, -self.limit, self.limit)
        if self.is_root:
            position = jnp.maximum(position, float(jnp.finfo(self.dtype).smallest_subnormal))
        return position.astype(self.dtype)


# These divisors replace a scale of zero. No group has a smaller scale unless it is all zeros, and
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
    """Return the code of a name; a code is returned as it is."""
    if isinstance(code, Code):
        return code
    if code not in CODES:
        raise ValueError(f"a code must be one of {', '.join(CODES)}; got {code!r}")
    return CODES[code]


def as_scale_dtype(dtype: DTypeLike) -> np.dtype:
    """Check the dtype of scales, and return it.

    Raises:
        ValueError: If scales cannot have this dtype.
    """
    found = np.dtype(dtype)
    if found not in (np.dtype(jnp.bfloat16), np.dtype(np.float32)):
        raise ValueError(f"scale_dtype must be bfloat16 or float32; got {found.name}.")
    return found


def scale_of(magnitude: Values, dtype: DTypeLike) -> Shaped[Array, "..."]:
    """Return the scale for a largest magnitude: rounded up to bfloat16, or as it is."""
    if np.dtype(dtype) == np.float32:
        return magnitude
    # Adding 0xFFFF before the low bits are cut off rounds up: no value of the group may be above
    # its scale. The NaNs with the largest bits would carry into the sign, so the minimum replaces
    # them. It is a minimum of signed integers, since Mosaic TPU has no unsigned minimum.
    word = jnp.minimum(bitcast_convert_type(magnitude, jnp.int32), 0x7FFF0000)
    high = (bitcast_convert_type(word, jnp.uint32) + 0xFFFF) >> 16
    return bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)


def _root(position: Values, noise: Values | None, nearest: Callable[[Any], Any]) -> Values:
    if noise is None:
        return nearest(position)
    below = _floor(position)
    # The chance to round up is the place of the square between the squares of the two nearest
    # codes. If roots were right on average, squares would be too large, and the error would add up
    # in a moment that is kept for many steps.
    chance = (position - below) * (position + below) / (2 * below + 1)
    return jnp.where(noise < chance, below + 1, below)


def _floor(value: Values) -> Values:
    # Of values that are not negative, and without `floor`, which Mosaic GPU does not have.
    return value.astype(jnp.int32).astype(jnp.float32)
