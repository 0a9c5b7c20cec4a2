"""Facts about traced programs."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core

from halfstep._base.jaxprs import ClosedJaxpr


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr and of every jaxpr inside it."""
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    for equation in jaxpr.eqns:
        yield equation
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda p: isinstance(p, core.Jaxpr | ClosedJaxpr)
        ):
            is_function = isinstance(parameter, core.Jaxpr | ClosedJaxpr)
            # With `jax_remat3` the parameter is an operation that has the function.
            inside = parameter if is_function else getattr(parameter, "jaxpr", None)
            if isinstance(inside, core.Jaxpr | ClosedJaxpr):
                yield from equations(inside)


def contractions(func: Any, *args: Any) -> list[str]:
    """The dtype of every dot and convolution: of its operands, or `mixed`."""
    found = []
    for equation in equations(jax.make_jaxpr(func)(*args)):
        if equation.primitive.name in ("dot_general", "conv_general_dilated"):
            dtypes = {str(v.aval.dtype) for v in equation.invars[:2]}
            found.append(dtypes.pop() if len(dtypes) == 1 else "mixed")
    return found
