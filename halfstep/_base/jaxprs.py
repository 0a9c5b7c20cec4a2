"""Read traced functions, the functions in an operation's parameters, and the types of values."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend import core

if TYPE_CHECKING:
    from jax.extend.core import Jaxpr as ClosedJaxpr
else:
    # A traced function with its constants; since JAX 0.12 every traced function has them.
    ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)


def closed(jaxpr: object) -> ClosedJaxpr:
    """Return a traced function together with its constants.

    Up to JAX 0.10 some primitives hold an open function, which needs nothing but its operands.
    """
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr
    if isinstance(jaxpr, core.Jaxpr):
        # Constants without values become operands, which come first.
        inputs: Any = [*jaxpr.constvars, *jaxpr.invars]
        opened = jaxpr.replace(constvars=[], invars=inputs) if jaxpr.constvars else jaxpr
        return ClosedJaxpr(opened, ())
    # Callers that read a parameter of another form raise their own error.
    raise TypeError(f"a traced function is needed, got {type(jaxpr).__name__}")


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[ClosedJaxpr]:
    """Yield the functions that an operation's parameters hold, whatever their names."""
    # An operation that is written as a class (`jax.experimental.hijax`) has parameters of its own.
    own: Any = getattr(params.get("_prim"), "params", {})
    for value in jax.tree.leaves([*params.values(), *own.values()], is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
            yield closed(value)


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, core.Jaxpr | ClosedJaxpr)


def varying_axes(x: jax.Array | np.ndarray | jax.ShapeDtypeStruct) -> frozenset[str]:
    """Return the mesh axes over which a value differs between shards, where `shard_map` tracks it.

    Without tracking (`check_vma=False`, or outside `shard_map`) the set is empty.
    """
    kind: Any = jax.typeof(x)
    return frozenset(kind.manual_axis_type.varying)
