"""What is kept for the backward pass, in 8 bits instead of 16.

The forward pass does not change. The gradient is made of operands that are rounded to 8 bits, each
row with a scale of its own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad
from jax.lax import bitcast_convert_type

from halfstep._autocast._linear import linear
from halfstep._recipe import Factor
from halfstep.quant._scaled import inverse, power_of_two, saturated

# Smaller ones are not worth a scale.
_LEAST_ROW, _LEAST = 16, 1024
# The bits of plus and minus infinity. e4m3 has none: its two NaNs stand for them, and a NaN makes
# the scale of its row one.
_INFINITIES = MappingProxyType({"e4m3": (0x7F, 0xFF), "e5m2": (0x7C, 0xFC)})


class Kept(NamedTuple):
    """An array in 8 bits, with a scale for each row."""

    elements: Any
    scale: Any


def keep(value: Any, factor: Factor) -> Any:
    """An array as it is kept: in 8 bits if it is large and of 16."""
    fits = value.ndim >= 2 and value.shape[-1] >= _LEAST_ROW and value.size >= _LEAST
    if not fits or value.dtype.itemsize != 2 or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    # A masked score is infinite, and stays so: the largest of the others is what counts.
    infinite = jnp.isinf(value)
    amax = jnp.max(jnp.abs(jnp.where(infinite, 0, value)), axis=-1, keepdims=True)
    scale = power_of_two(amax, factor.max)
    elements = saturated(value * scale.astype(value.dtype), factor)
    code = jnp.where(value > 0, *_INFINITIES[factor.element]).astype(jnp.uint8)
    bits = jnp.where(infinite, code, bitcast_convert_type(elements, jnp.uint8))
    # A power of two: bfloat16 holds it.
    return Kept(bitcast_convert_type(bits, factor.dtype), inverse(scale).astype(jnp.bfloat16))


def restore(value: Any, dtype: np.dtype) -> Any:
    """The array that was kept."""
    if not isinstance(value, Kept):
        return value
    wide = value.elements.astype(jnp.float32)
    if value.elements.dtype == jnp.float8_e4m3fn:
        negative = bitcast_convert_type(value.elements, jnp.uint8) >= 0x80
        sign = jnp.where(negative, -jnp.inf, jnp.inf)
        wide = jnp.where(jnp.isnan(wide), sign.astype(jnp.float32), wide)
    return (wide * value.scale.astype(jnp.float32)).astype(dtype)


def contract_kept(
    primitive: Any,
    params: Mapping[str, Any],
    operands: Sequence[Any],
    *,
    compute: np.dtype,
    out: np.dtype,
    gradients: Sequence[np.dtype],
    factor: Factor,
) -> Any:
    """Multiply in the compute dtype, and keep both factors in 8 bits for the gradient.

    Args:
        primitive: The contraction.
        params: What it is bound with.
        operands: Two factors, in the compute dtype or float32, and what else it takes.
        compute: The dtype in which the factors enter.
        out: The dtype of the result.
        gradients: The dtype in which the gradient of each factor is made.
        factor: How factors are kept.
    """
    options = {**params, "preferred_element_type": out}
    shapes = tuple(tuple(operand.shape) for operand in operands[:2])

    def forward(left: Any, right: Any, rest: Any) -> Any:
        return primitive.bind(left.astype(compute), right.astype(compute), *rest, **options)

    func = jax.custom_jvp(forward)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        left, right, rest = primals
        moving = tuple(i for i in (0, 1) if not isinstance(tangents[i], SymbolicZero))
        result = func(left, right, rest)
        if not moving:
            return result, jnp.zeros_like(result)
        factors = [value.astype(compute) for value in (left, right)]
        # What one factor's gradient needs of the other.
        kept = [keep(factors[i], factor) if 1 - i in moving else None for i in (0, 1)]
        derivative = _Derivative(
            primitive, tuple(options.items()), shapes, compute, out, tuple(gradients), moving
        )
        return result, linear(derivative, (kept, rest), [tangents[i] for i in moving])

    func.defjvp(rule, symbolic_zeros=True)
    return func(operands[0], operands[1], tuple(operands[2:]))


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The derivative of a contraction, by factors as they were kept."""

    primitive: Any
    options: tuple[tuple[str, Any], ...]
    shapes: tuple[tuple[int, ...], ...]
    compute: np.dtype
    out: np.dtype
    gradients: tuple[np.dtype, ...]
    moving: tuple[int, ...]

    def push(self, residuals: Any, linears: Sequence[Any]) -> Any:
        """The tangent of the result."""
        kept, rest = residuals
        total: Any = None
        for place, tangent in zip(self.moving, linears, strict=True):
            factors = [tangent.astype(self.compute), restore(kept[1 - place], self.compute)]
            made = self.primitive.bind(
                *factors[:: 1 if place == 0 else -1], *rest, **dict(self.options)
            )
            total = made if total is None else total + made
        return total

    def pull(self, residuals: Any, cotangent: Any, likes: Sequence[Any]) -> Sequence[Any]:
        """The gradients of the factors."""
        kept, rest = residuals
        arrived = cotangent.astype(self.compute)
        made = []
        for place, like in zip(self.moving, likes, strict=True):
            other = restore(kept[1 - place], self.compute)
            dtype = self.gradients[place]
            aval: Any = jax.typeof(other)
            # Of the dtype in which it is to come out: JAX casts to it.
            missing = ad.UndefinedPrimal(aval.update(shape=self.shapes[place], dtype=dtype))
            factors = [missing, other] if place == 0 else [other, missing]
            options = {**dict(self.options), "preferred_element_type": dtype}
            transpose = ad.primitive_transposes[self.primitive]
            gradient = transpose(arrived, *factors, *rest, **options)[place]
            made.append(gradient.astype(like.dtype))
        return made
