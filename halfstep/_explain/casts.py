"""How many casts a function makes when it runs."""

from typing import Any

import jax
import jax.numpy as jnp

from halfstep._base import FlatCall
from halfstep._program import Opaque, structure_of


def casts(call: FlatCall) -> int:
    """Conversions between floating-point dtypes in one forward pass; loops by their length.

    A `while` loop counts as one iteration, and all branches of a `cond` count.
    """
    return _count(jax.make_jaxpr(call)(*call.arrays).jaxpr)


def _count(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type":
            before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
            total += before != after and is_float(before) and is_float(after)
            continue
        found = structure_of(equation.primitive.name, equation.params)
        if found is not None and not isinstance(found, Opaque):
            total += sum(inner.times * _count(inner.function.jaxpr) for inner in found.inner())
    return total


def is_float(dtype: Any) -> bool:
    """Whether a dtype is one of real floating-point numbers."""
    return jnp.issubdtype(dtype, jnp.floating)
