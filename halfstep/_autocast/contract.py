"""Contractions whose result or whose gradients come out wider than their operands.

The derivative of a matrix product has the dtypes of the product. Two things want others: a result
that stays float32 would have its gradients multiplied in float32; and the gradient of a weight,
rounded to 16 bits where the product ends, is also summed over devices in 16 bits, where finite
shards add up to infinity. So these contractions have a derivative of their own: cotangents enter
products in the compute dtype, and the gradients of parameters come out in the dtype asked for.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.lax import DotDimensionNumbers

from halfstep._autocast.saved.float8 import Derivative
from halfstep._base import cast
from halfstep._policy import Factor

Options = tuple[tuple[str, Any], ...]
"""What a primitive is bound with, as a parameter of another one, which has to be hashable."""


def contract(
    primitive: Primitive,
    params: Mapping[str, Any],
    operands: Sequence[Any],
    *,
    compute: np.dtype,
    out: np.dtype,
    gradients: Sequence[np.dtype],
    kept: Factor | None = None,
) -> Any:
    """Multiply in the compute dtype.

    Args:
        primitive: The contraction.
        params: What it is bound with.
        operands: Two factors, in the compute dtype or float32, and what else it takes.
        compute: The dtype in which the factors enter.
        out: The dtype of the result.
        gradients: The dtype in which the gradient of each factor is made.
        kept: How factors are kept for the gradient, if not in the compute dtype.
    """
    options = {**params, "preferred_element_type": out}

    @jax.custom_jvp
    def func(*values: Any) -> Any:
        return _bind(primitive, options, values, compute)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        result = _bind(primitive, options, primals, compute)
        if kept is not None:
            derivative = Derivative(primitive, tuple(options.items()), compute, tuple(gradients))
            return derivative(primals, tangents, result, kept)
        terms = [
            _linear.bind(
                *primals[:position],
                tangents[position],
                *primals[position + 1 :],
                position=position,
                contraction=primitive,
                options=tuple(options.items()),
                compute=compute,
                gradient=gradients[position],
            )
            for position in (0, 1)
            if not isinstance(tangents[position], SymbolicZero)
        ]
        return result, _total(terms, result)

    func.defjvp(rule, symbolic_zeros=True)
    return func(*operands)


def _bind(
    primitive: Primitive, options: Mapping[str, Any], values: Sequence[Any], compute: np.dtype
) -> jax.Array:
    factors = [_cast(value, compute) for value in values[:2]]
    return primitive.bind(*factors, *values[2:], **options)


def _cast(value: jax.Array | np.ndarray, dtype: np.dtype) -> jax.Array | np.ndarray:
    return value if value.dtype == dtype else cast(value, dtype)


# A contraction as a linear function of one of its factors.
_linear = Primitive("halfstep_contraction")


def _apply(
    *values: Any, contraction: Primitive, options: Options, compute: np.dtype, **_: object
) -> jax.Array:
    return _bind(contraction, dict(options), values, compute)


def _abstract(
    *avals: ShapedArray, contraction: Primitive, options: Options, compute: np.dtype, **_: object
) -> ShapedArray:
    factors = [aval.update(dtype=compute) for aval in avals[:2]]
    return contraction.abstract_eval(*factors, *avals[2:], **dict(options))[0]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, position: int, **params: Any) -> Any:
    terms = []
    for which in (0, 1):
        if not isinstance(tangents[which], ad.Zero):
            given = [*primals[:which], tangents[which], *primals[which + 1 :]]
            # Linear in what moves now: of the second derivative, this is all that there is.
            terms.append(_linear.bind(*given, position=which, **params))
    result = _linear.bind(*primals, position=position, **params)
    return result, _total(terms, result)


def _total(terms: Sequence[jax.Array], result: jax.Array) -> jax.Array:
    """The tangent of a result: the sum of what each factor that moves adds to it."""
    if not terms:
        return jnp.zeros_like(result)
    return terms[0] if len(terms) == 1 else terms[0] + terms[1]


def _transpose(
    cotangent: jax.Array | ad.Zero,
    *values: Any,
    position: int,
    contraction: Primitive,
    options: Options,
    compute: np.dtype,
    gradient: np.dtype,
) -> Sequence[Any]:
    if isinstance(cotangent, ad.Zero):
        return [None] * len(values)
    given = list(values)
    given[1 - position] = _cast(values[1 - position], compute)
    # JAX multiplies in the transpose with the `preferred_element_type` of the product itself. That
    # is how the gradient of a weight leaves its product in float32, without a second product and
    # without a cast of what was rounded already.
    params = {**dict(options), "preferred_element_type": gradient}
    return ad.primitive_transposes[contraction](_cast(cotangent, compute), *given, **params)


def _batch(values: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
    contraction, options = params["contraction"], dict(params["options"])
    if contraction is not jax.lax.dot_general_p:
        # As the contraction itself; its gradients are then those of any other.
        return jax.vmap(functools.partial(_apply, **params), in_axes=tuple(axes))(*values), 0
    (left, right), (left_axis, right_axis) = values, (_axis(axis) for axis in axes)
    # Not by `vmap` of `_apply`, which would bind the plain contraction: its derivative has the
    # dtypes of its operands, and the gradient would no longer come out as asked for.
    options["dimension_numbers"], out_axis = _batched(
        options["dimension_numbers"], left.ndim - (left_axis is not None), left_axis, right_axis
    )
    return _linear.bind(left, right, **{**params, "options": tuple(options.items())}), out_axis


def _axis(axis: object) -> int | None:
    """The dimension that is mapped over; JAX says `None` for none."""
    return axis if isinstance(axis, int) else None


def _batched(
    dimensions: DotDimensionNumbers,
    left_ndim: int,
    left_axis: int | None,
    right_axis: int | None,
) -> tuple[DotDimensionNumbers, int]:
    """The dimensions of a product one of whose factors, or both, have one more."""
    (left_sum, right_sum), (left_batch, right_batch) = dimensions

    def moved(numbers: Sequence[int], axis: int | None) -> tuple[int, ...]:
        return tuple(n if axis is None or n < axis else n + 1 for n in numbers)

    contracted = moved(left_sum, left_axis), moved(right_sum, right_axis)
    batch = moved(left_batch, left_axis), moved(right_batch, right_axis)
    if left_axis is not None and right_axis is not None:
        return (contracted, ((left_axis, *batch[0]), (right_axis, *batch[1]))), 0
    # In one of them only: one more dimension that is neither summed nor shared.
    shared = len(left_batch)
    if left_axis is not None:
        return (contracted, batch), shared + _position(left_axis, contracted[0], batch[0])
    before = left_ndim - len(left_sum) - len(left_batch)
    position = 0 if right_axis is None else _position(right_axis, contracted[1], batch[1])
    return (contracted, batch), shared + before + position


def _position(axis: int, contracted: Sequence[int], batch: Sequence[int]) -> int:
    """Which of a factor's own dimensions, those that are in the result, an axis is."""
    return sum(number not in (*contracted, *batch) for number in range(axis))


_linear.def_impl(_apply)
_linear.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_apply, multiple_results=False))
