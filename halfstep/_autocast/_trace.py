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
from halfstep._autocast._types import Plan, Settings
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

    graph = graph_of(jax.make_jaxpr(flat)(*arrays))
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
    avals = [graph.avals[number] for number in graph.inputs]
    made = plan(
        graph,
        [_of_dtype(kind, aval, settings) for kind, aval in zip(kinds, avals, strict=True)],
        settings,
    )
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


def _of_dtype(kind: Kind, aval: Any, settings: Settings) -> Kind:
    if is_subject(aval, settings.compute):
        return kind
    # A parameter that is stored in the compute dtype yields too, when it is made float32.
    stored = kind is Kind.PARAM and getattr(aval, "dtype", None) == settings.compute
    return kind if stored else Kind.OTHER
