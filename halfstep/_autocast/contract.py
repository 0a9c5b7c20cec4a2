"""Run contractions whose result or gradients are wider than their operands.

The derivative of a matrix product has the dtypes of the product. Two cases need other dtypes. If a
result stays float32, its gradients would be multiplied in float32. If the gradient of a weight is
rounded to 16 bits where the product ends, it is also summed over devices in 16 bits, where finite
shards add up to infinity. So these contractions have a derivative of their own: cotangents enter
products in the compute dtype, and the gradients of parameters come out in the requested dtype.
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

from halfstep._base import cast

Options = tuple[tuple[str, Any], ...]
"""The parameters of a primitive in hashable form, so that another primitive can take them."""


def contract(
    primitive: Primitive,
    params: Mapping[str, Any],
    operands: Sequence[Any],
    *,
    compute: np.dtype,
    out: np.dtype,
    gradients: Sequence[np.dtype],
) -> Any:
    """Multiply in the compute dtype.

    Args:
        primitive: The contraction.
        params: The parameters of the primitive.
        operands: Two factors, in the compute dtype or float32, and the other operands.
        compute: The dtype in which the factors enter.
        out: The dtype of the result.
        gradients: The dtype of each factor's gradient.
    """
    options = {**params, "preferred_element_type": out}

    @jax.custom_jvp
    def func(*values: Any) -> Any:
        return _bind(primitive, options, values, compute)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        result = _bind(primitive, options, primals, compute)
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
            # The term is linear in the factor that has a tangent now. The second derivative has
            # no other terms.
            terms.append(_linear.bind(*given, position=which, **params))
    result = _linear.bind(*primals, position=position, **params)
    return result, _total(terms, result)


def _total(terms: Sequence[jax.Array], result: jax.Array) -> jax.Array:
    """Return the tangent of a result: the sum of the terms of all factors with a tangent."""
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
    # In the transpose, JAX multiplies with the `preferred_element_type` of the product itself. So
    # the gradient of a weight leaves its product in float32, without a second product and without a
    # cast of a value that is already rounded.
    params = {**dict(options), "preferred_element_type": gradient}
    return ad.primitive_transposes[contraction](_cast(cotangent, compute), *given, **params)


def _batch(values: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
    contraction, options = params["contraction"], dict(params["options"])
    if contraction is not jax.lax.dot_general_p:
        # Bind the plain contraction: its gradients are then those of any other contraction.
        return jax.vmap(functools.partial(_apply, **params), in_axes=tuple(axes))(*values), 0
    (left, right), (left_axis, right_axis) = values, (_axis(axis) for axis in axes)
    # Not `vmap` of `_apply`: it would bind the plain contraction, whose derivative has the dtypes
    # of its operands. The gradient would no longer come out in the requested dtype.
    options["dimension_numbers"], out_axis = _batched(
        options["dimension_numbers"], left.ndim - (left_axis is not None), left_axis, right_axis
    )
    return _linear.bind(left, right, **{**params, "options": tuple(options.items())}), out_axis


def _axis(axis: object) -> int | None:
    """Return the dimension that is mapped over, or `None` if none is."""
    return axis if isinstance(axis, int) else None


def _batched(
    dimensions: DotDimensionNumbers,
    left_ndim: int,
    left_axis: int | None,
    right_axis: int | None,
) -> tuple[DotDimensionNumbers, int]:
    """Return the dimension numbers of a product with a mapped axis, and where that axis goes."""
    (left_sum, right_sum), (left_batch, right_batch) = dimensions

    def moved(numbers: Sequence[int], axis: int | None) -> tuple[int, ...]:
        return tuple(n if axis is None or n < axis else n + 1 for n in numbers)

    contracted = moved(left_sum, left_axis), moved(right_sum, right_axis)
    batch = moved(left_batch, left_axis), moved(right_batch, right_axis)
    if left_axis is not None and right_axis is not None:
        return (contracted, ((left_axis, *batch[0]), (right_axis, *batch[1]))), 0
    # Only one factor has the mapped axis: it is neither summed nor shared.
    shared = len(left_batch)
    if left_axis is not None:
        return (contracted, batch), shared + _position(left_axis, contracted[0], batch[0])
    before = left_ndim - len(left_sum) - len(left_batch)
    position = 0 if right_axis is None else _position(right_axis, contracted[1], batch[1])
    return (contracted, batch), shared + before + position


def _position(axis: int, contracted: Sequence[int], batch: Sequence[int]) -> int:
    """Return the position of an axis among a factor's own dimensions, those in the result."""
    return sum(number not in (*contracted, *batch) for number in range(axis))


_linear.def_impl(_apply)
_linear.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_apply, multiple_results=False))
