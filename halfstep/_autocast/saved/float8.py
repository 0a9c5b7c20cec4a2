"""Keep residuals for the backward pass in 8 bits instead of 16.

The forward pass does not change. The gradient is computed from operands that are rounded to 8 bits,
each row with a scale of its own.
"""

import dataclasses
import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.lax import bitcast_convert_type

from halfstep._autocast.f8.linear import gradient_by, linear, product_with
from halfstep._policy import Factor
from halfstep._program import size
from halfstep.quant._scaled import inverse, power_of_two, saturated

# Smaller rows and arrays are not worth a scale.
_LEAST_ROW, _LEAST = 16, 1024
# The bits of plus and minus infinity. e4m3 has no infinities: its two NaNs stand for them, and a
# NaN in a row makes the scale of that row NaN.
_INFINITIES = MappingProxyType({"e4m3": (0x7F, 0xFF), "e5m2": (0x7C, 0xFC)})


class Kept(NamedTuple):
    """An array in 8 bits, with a scale for each row."""

    elements: jax.Array
    scale: jax.Array


Residuals = tuple[list[Any], Sequence[Any]]
"""Both factors as they are kept, `None` for one that no gradient needs; and the other operands."""


def keep(value: jax.Array, factor: Factor) -> jax.Array | Kept:
    """Return an array as it is kept: in 8 bits if it is large and has 16 bits."""
    row = value.shape[-1] if value.ndim >= 2 else 0
    # A row whose length is a symbol of `jax.export` may be short.
    fits = isinstance(row, int) and row >= _LEAST_ROW and size(value) >= _LEAST
    if not fits or value.dtype.itemsize != 2 or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    # A masked score is infinite and stays infinite: the scale depends on the others only.
    infinite = jnp.isinf(value)
    amax = jnp.max(jnp.abs(jnp.where(infinite, 0, value)), axis=-1, keepdims=True)
    scale = power_of_two(amax, factor.max)
    elements = saturated(value * scale.astype(value.dtype), factor)
    code = jnp.where(value > 0, *_INFINITIES[factor.element]).astype(jnp.uint8)
    bits = jnp.where(infinite, code, bitcast_convert_type(elements, jnp.uint8))
    # The scale is a power of two, so bfloat16 holds it.
    return Kept(bitcast_convert_type(bits, factor.dtype), inverse(scale).astype(jnp.bfloat16))


def restore(value: jax.Array | Kept, dtype: np.dtype) -> jax.Array:
    """Return an array that was kept, in a dtype."""
    if not isinstance(value, Kept):
        return value
    wide = value.elements.astype(jnp.float32)
    if value.elements.dtype == jnp.float8_e4m3fn:
        negative = bitcast_convert_type(value.elements, jnp.uint8) >= 0x80
        sign = jnp.where(negative, -jnp.inf, jnp.inf)
        wide = jnp.where(jnp.isnan(wide), sign.astype(jnp.float32), wide)
    return (wide * value.scale.astype(jnp.float32)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of a contraction, computed from factors that are kept in 8 bits."""

    primitive: Primitive
    options: tuple[tuple[str, Any], ...]
    """The parameters of the primitive."""
    compute: np.dtype
    gradients: tuple[np.dtype, ...]
    """The dtype of each factor's gradient."""
    moving: tuple[int, ...] = ()
    """The factors that it is linear in."""

    def __call__(
        self, primals: Sequence[Any], tangents: Sequence[Any], result: jax.Array, factor: Factor
    ) -> tuple[jax.Array, jax.Array]:
        """Return the result and its tangent; tangents of constant factors are `SymbolicZero`."""
        moving = tuple(i for i in (0, 1) if not isinstance(tangents[i], SymbolicZero))
        if not moving:
            return result, jnp.zeros_like(result)
        # Each factor, as the gradient of the other one needs it.
        kept = [
            keep(primals[i].astype(self.compute), factor) if 1 - i in moving else None
            for i in (0, 1)
        ]
        # Without the barrier, XLA could keep factors as they are, and round them when needed.
        result, kept = jax.lax.optimization_barrier((result, kept))
        function = dataclasses.replace(self, moving=moving)
        return result, linear(function, (kept, primals[2:]), [tangents[i] for i in moving])

    def push(self, residuals: Residuals, linears: Sequence[jax.Array]) -> jax.Array:
        """Return the tangent of the result."""
        kept, rest = residuals
        terms = [
            product_with(
                self.primitive,
                dict(self.options),
                place,
                tangent.astype(self.compute),
                restore(kept[1 - place], self.compute),
                rest,
            )
            for place, tangent in zip(self.moving, linears, strict=True)
        ]
        return functools.reduce(jnp.add, terms)

    def pull(
        self, residuals: Residuals, cotangent: jax.Array, likes: Sequence[jax.ShapeDtypeStruct]
    ) -> Sequence[jax.Array]:
        """Return the gradients of the factors."""
        kept, rest = residuals
        # Without the barrier, XLA would restore a factor where it is made, and keep it in 16 bits
        # from there on.
        kept, cotangent = jax.lax.optimization_barrier((kept, cotangent))
        return [
            gradient_by(
                self.primitive,
                dict(self.options),
                place,
                cotangent.astype(self.compute),
                restore(kept[1 - place], self.compute),
                rest,
                like.update(dtype=self.gradients[place]),
            ).astype(like.dtype)
            for place, like in zip(self.moving, likes, strict=True)
        ]
