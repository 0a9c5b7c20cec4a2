"""Trace a call as it is written, and plan it."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu

from halfstep._arguments import Arguments
from halfstep._autocast._graph import graph_of
from halfstep._autocast._kinds import Kind, is_subject
from halfstep._autocast._plan import plan
from halfstep._autocast._types import FLOAT32, Plan, Settings
from halfstep._leaves import is_array
from halfstep._state import MarkedLeaf


@dataclasses.dataclass(frozen=True)
class Traced:
    """A call: how it runs, and on what."""

    plan: Plan
    arrays: list[Any]
    """The values of the plan's inputs."""
    paths: tuple[str, ...]
    """Where in the call each of them is, beginning with the parameter's name."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Makes what the function returns out of the plan's outputs."""


def trace(
    func: Callable[..., Any],
    settings: Settings,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    params: Collection[int | str],
    keep: Sequence[str],
) -> Traced:
    """Trace a function on the arrays of its arguments; what is no array is part of it.

    Args:
        func: Any function that can be traced.
        settings: What is asked for.
        args: Its arguments; arrays may be `jax.ShapeDtypeStruct`.
        kwargs: The same, by name.
        params: Which arguments hold parameters, by position or name.
        keep: Path rules for arguments that stay in float32.
    """
    call = Arguments(func, args, kwargs)
    leaves = [leaf for _, leaf, _ in call.leaves]
    dynamic = [is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves]
    arrays = [leaf for leaf, keep in zip(leaves, dynamic, strict=True) if keep]
    static: list[Any] = []

    def flat(*values: Any) -> list[Any]:
        given = iter(values)
        args, kwargs = call.rebuild(
            [next(given) if keep else leaf for leaf, keep in zip(leaves, dynamic, strict=True)]
        )
        results, treedef = jtu.tree_flatten(func(*args, **kwargs))
        traced = [eqx.is_array(result) for result in results]
        others = [None if keep else leaf for leaf, keep in zip(results, traced, strict=True)]
        static[:] = [treedef, others, traced]
        return [leaf for leaf, keep in zip(results, traced, strict=True) if keep]

    parameters = {
        call.names.index(which) if isinstance(which, str) else which
        for which in params
        if (which in call.names if isinstance(which, str) else which < len(args))
    }
    kinds = [
        _kind(leaf, kept, owner in parameters)
        for leaf, kept, owner, keep in zip(
            call.leaves, call.select(keep), call.owners, dynamic, strict=True
        )
        if keep
    ]
    # What a function is written for is float32: traced so, a parameter that is stored in the
    # compute dtype neither changes what it is added to nor the dtype of a loop's carry.
    stored = _stored(kinds, arrays, settings)
    given = [_as_float32(x) if low else x for x, low in zip(arrays, stored, strict=True)]
    graph = graph_of(jax.make_jaxpr(flat)(*given))
    avals = [graph.avals[number] for number in graph.inputs]
    kinds = [Kind.STORED if low else kind for kind, low in zip(kinds, stored, strict=True)]
    of_dtype = [
        kind if is_subject(aval, settings.compute) else Kind.OTHER
        for kind, aval in zip(kinds, avals, strict=True)
    ]
    made = plan(graph, of_dtype, settings)
    treedef, others, traced = static

    def rebuild(results: Sequence[Any]) -> Any:
        given = iter(results)
        return jtu.tree_unflatten(
            treedef,
            [next(given) if keep else leaf for leaf, keep in zip(others, traced, strict=True)],
        )

    paths = [leaf.path for leaf, keep in zip(call.leaves, dynamic, strict=True) if keep]
    return Traced(made, arrays, tuple(paths), rebuild)


def _kind(leaf: MarkedLeaf, kept: bool, is_parameter: bool) -> Kind:
    if kept:
        return Kind.KEPT
    return Kind.PARAM if is_parameter and not leaf.is_state else Kind.WIDE


def _stored(kinds: Sequence[Kind], arrays: Sequence[Any], settings: Settings) -> list[bool]:
    """Which arrays are parameters that are stored in the compute dtype."""
    pairs = [(kind is Kind.PARAM, array.dtype) for kind, array in zip(kinds, arrays, strict=True)]
    if (False, settings.compute) in pairs and FLOAT32 not in [dtype for _, dtype in pairs]:
        # All of 16 bits, data too: it is written for those.
        return [False] * len(pairs)
    return [pair == (True, settings.compute) for pair in pairs]


def _as_float32(array: Any) -> Any:
    return jax.eval_shape(lambda x: x.astype(FLOAT32), array)
