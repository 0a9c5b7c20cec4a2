"""Trace a call as it is written, and plan it."""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from halfstep._autocast.kinds import Kind, is_subject
from halfstep._autocast.planning import plan
from halfstep._autocast.plans import FLOAT32, Plan, Settings
from halfstep._base import ClosedJaxpr, FlatCall, MarkedLeaf, parameters_of
from halfstep._program import graph_of


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """A traced call: its plan, and the arrays that it runs on."""

    plan: Plan
    arrays: list[Any]
    """The values of the plan's inputs."""
    paths: tuple[str, ...]
    """The path of each input in the call, beginning with the parameter's name."""
    rebuild: Callable[[Sequence[Any]], Any]
    """Builds the function's return value from the plan's outputs."""
    program: ClosedJaxpr
    """The traced program."""
    results: tuple[Any, ...]
    """The type of each result without autocast."""


def trace(
    func: Callable[..., Any],
    settings: Settings,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    params: Collection[int | str],
    keep: Sequence[str],
) -> TracedCall:
    """Trace a function on the arrays of its arguments, and plan it.

    Arguments that are not arrays become part of the function.

    Args:
        func: Any function that can be traced.
        settings: What the user has asked for.
        args: Its arguments; arrays may be `jax.ShapeDtypeStruct`.
        kwargs: Its keyword arguments.
        params: Which arguments hold parameters, by position or name.
        keep: Path rules for arguments that stay in float32.
    """
    call = FlatCall(func, args, kwargs)
    arguments, arrays = call.arguments, call.arrays
    _check_params(func, params, arguments.names)
    parameters = {
        arguments.names.index(which) if isinstance(which, str) else which
        for which in params
        if (which in arguments.names if isinstance(which, str) else which < len(args))
    }
    of_leaves = zip(arguments.leaves, arguments.select(keep), arguments.owners, strict=True)
    kinds = call.dynamic(
        [_kind(leaf, kept, owner in parameters) for leaf, kept, owner in of_leaves]
    )
    # Functions are written for float32, so a parameter that is stored in the compute dtype is
    # traced as float32. Then it changes neither what it is added to nor a loop carry's dtype.
    stored = _stored(kinds, arrays, settings)
    given = [_as_float32(x) if low else x for x, low in zip(arrays, stored, strict=True)]
    program = jax.make_jaxpr(call)(*given)
    graph = graph_of(program)
    avals = [graph.avals[number] for number in graph.inputs]
    kinds = [Kind.STORED if low else kind for kind, low in zip(kinds, stored, strict=True)]
    of_dtype = [
        kind if is_subject(aval, settings.compute) else Kind.OTHER
        for kind, aval in zip(kinds, avals, strict=True)
    ]
    made = plan(graph, of_dtype, settings)
    results = program.out_avals
    if any(stored):
        results = _results(call, arrays, default=results)
    return TracedCall(made, arrays, call.paths, call.rebuild, program, tuple(results))


def _check_params(
    func: Callable[..., Any], params: Collection[int | str], given: Sequence[str]
) -> None:
    """Raise if `params` names an argument that a function does not take.

    The name would be ignored, and the argument's arrays would widen the values that they are
    combined with, which costs memory and changes no result.
    """
    found = parameters_of(func)
    if found is None:
        return
    parameters = found.values()
    kinds = {parameter.kind for parameter in parameters}
    named = [
        one.name for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    for which in params:
        if isinstance(which, str):
            known = which in (*named, *given) or inspect.Parameter.VAR_KEYWORD in kinds
        else:
            count = max(len(named), len(given))
            known = which < count or inspect.Parameter.VAR_POSITIONAL in kinds
        # The first argument is the default, also of functions that take none.
        if not known and which != 0:
            raise ValueError(
                f"`params` names {which!r}, which `{getattr(func, '__name__', 'func')}` does not "
                f"take. Choose from {', '.join(named)}, or give positions."
            )


def _results(
    call: Callable[..., Any], arrays: Sequence[Any], *, default: Sequence[Any]
) -> Sequence[Any]:
    """Return the result types of a function for parameters in the dtype they are stored in.

    The function may not accept such parameters: it may add them to float32 while JAX is told to
    promote nothing, or a loop's carry would change its dtype. In that case `default`, the result
    types for float32, is returned.
    """
    try:
        return jax.make_jaxpr(call)(*arrays).out_avals
    except (TypeError, jax.dtypes.TypePromotionError):
        return default


def _kind(leaf: MarkedLeaf, kept: bool, is_parameter: bool) -> Kind:
    if kept:
        return Kind.KEPT
    return Kind.PARAM if is_parameter and not leaf.is_state else Kind.WIDE


def _stored(kinds: Sequence[Kind], arrays: Sequence[Any], settings: Settings) -> list[bool]:
    """Return which arrays are parameters that are stored in the compute dtype."""
    pairs = [(kind is Kind.PARAM, array.dtype) for kind, array in zip(kinds, arrays, strict=True)]
    if (False, settings.compute) in pairs and FLOAT32 not in [dtype for _, dtype in pairs]:
        # Everything has 16 bits, the data too: the function is written for 16 bits.
        return [False] * len(pairs)
    return [pair == (True, settings.compute) for pair in pairs]


def _as_float32(
    array: jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct,
) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(lambda x: x.astype(FLOAT32), array)
