"""Walking through traced functions and the functions inside of them."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.extend import core


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[core.ClosedJaxpr]:
    """The functions that an operation's parameters hold."""
    for value in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr):
        if isinstance(value, core.ClosedJaxpr):
            yield value
        elif isinstance(value, core.Jaxpr):
            yield core.ClosedJaxpr(value, ())


def equations(jaxpr: Any) -> Iterator[core.JaxprEqn]:
    """All equations of a traced function and of every function inside of it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in(equation.params):
            yield from equations(inner.jaxpr)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)
