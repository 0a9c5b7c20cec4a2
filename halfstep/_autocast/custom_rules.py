"""Rewrite functions with their own rules for derivatives or `vmap`, and rewrite the rules.

A rule is traced when JAX asks for it, in float32 as it was written, and then planned and run like
any other function.
"""

import contextlib
from collections.abc import Generator, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.typing import ArrayLike

from halfstep._autocast.kinds import Kind, is_subject
from halfstep._autocast.nested import Call, Planner, inner_decision, with_own_rules
from halfstep._autocast.plans import Around, Decision, Settings, out_kinds
from halfstep._program import CustomJvp, CustomVjp, CustomVmap, Node, graph_of


def _plan_custom(
    node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner, around: Around
) -> Decision:
    custom = node.structured(CustomJvp, CustomVjp, CustomVmap)
    (graph,), (path,) = node.graphs, around.paths(node)
    inner = plan(graph, kinds, with_own_rules(settings), path=path)
    # An activation such as `jax.nn.relu` is a custom_jvp and may be part of an island. A custom_vjp
    # may be a kernel, such as flash attention, which is expensive to recompute.
    barrier = inner.has_barrier or not isinstance(custom, CustomJvp)
    return inner_decision(out_kinds(inner), (inner, tuple(kinds), plan), barrier=barrier)


def _run_custom_jvp(call: Call) -> list[Any]:
    node, decision, run = call.node, call.decision, call.run
    inner, kinds, plan = decision.inner
    custom = node.structured(CustomJvp)
    consts = custom.consts

    @jax.custom_jvp
    def func(*values: Any) -> Any:
        return _arrays(run(inner, values, decision.outs))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        if custom.symbolic_zeros:
            zeros = [isinstance(tangent, SymbolicZero) for tangent in tangents]
        else:
            zeros = [False] * len(tangents)
            tangents = [
                _instantiated(tangent, primal)
                for tangent, primal in zip(tangents, primals, strict=True)
            ]
        function, out_zeros = custom.rule(zeros)
        graph = graph_of(function, node.scope)
        moving = [i for i in range(consts, len(primals)) if not zeros[i]]
        given = [*primals[consts:], *(tangents[i] for i in moving)]
        of_given = [*kinds[consts:], *(kinds[i] for i in moving)]
        positions = range(len(primals) - consts, len(given))
        made = plan(graph, of_given, with_own_rules(call.settings), tangents=positions)
        of_tangents = [k for k, zero in zip(decision.outs, out_zeros, strict=True) if not zero]
        results = run(made, given, [*decision.outs, *of_tangents])
        count = len(decision.outs)
        nonzero = iter(results[count:])
        out = _arrays(results[:count])
        return out, tuple(
            zero_tangent(value) if zero else next(nonzero)
            for value, zero in zip(out, out_zeros, strict=True)
        )

    # Symbolic zeros are always asked for, even if the user's rule is not told about them. Which
    # tangents are zero is known only when the derivative is taken, and `rule` then makes the arrays
    # that the user's rule expects.
    func.defjvp(rule, symbolic_zeros=True)
    return list(func(*call.operands))


def _instantiated(
    tangent: jax.Array | np.ndarray | SymbolicZero, primal: jax.Array | np.ndarray
) -> jax.Array | np.ndarray:
    """Return a tangent as an array, for a rule that is not told which tangents are zero."""
    if not isinstance(tangent, SymbolicZero):
        return tangent
    aval: Any = tangent.aval
    if aval.dtype == jax.dtypes.float0:
        return np.zeros(aval.shape, jax.dtypes.float0)
    # Like the primal, so that inside a shard_map the tangent varies over the same axes.
    return jnp.zeros_like(primal, dtype=aval.dtype)


def zero_tangent(value: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    """Return a zero tangent of a value, as an array."""
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.zeros_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)


def _run_custom_vjp(call: Call) -> list[Any]:
    node, decision, operands, run = call.node, call.decision, call.operands, call.run
    inner, kinds, plan = decision.inner
    custom, settings = node.structured(CustomVjp), with_own_rules(call.settings)
    consts = custom.consts
    avals = [inner.graph.avals[number] for number in inner.graph.inputs]
    # A rule that asks for symbolic zeros is told which of its arguments are differentiated, and
    # which of its results are used. JAX 0.12 also asks about the latter where a rule is mapped.
    is_told = custom.symbolic_zeros or jax.__version_info__ >= (0, 12)

    @jax.custom_vjp
    def func(*values: Any) -> Any:
        return _arrays(run(inner, values, decision.outs))

    @_without_closures(custom)
    def forward(*primals: Any) -> Any:
        values = [primal.value for primal in primals] if is_told else primals
        # Most rules are not told what is differentiated, whatever the flags say.
        flags = [not custom.symbolic_zeros or primal.perturbed for primal in primals]
        # The rule is traced here and not when the plan is made: only now is it known which
        # arguments are differentiated.
        graph = graph_of(custom.forward(flags), node.scope)
        made = plan(graph, kinds[consts:], settings)
        forwarded = custom.forwarded()
        stored = sum(number is None for number in forwarded)
        of_stored = [made.out_kind(operand) for operand in graph.outputs[:stored]]
        results = run(made, values[consts:], [*of_stored, *decision.outs])
        made_here = zip(results, of_stored, map(graph.aval, graph.outputs), strict=False)
        handed_on = list(zip(values, kinds, avals, strict=True))
        kept = [next(made_here) if n is None else handed_on[n] for n in forwarded]
        # The kinds and types of residuals are known when the function is traced, and do not change.
        shapes[:] = [(kind, aval) for _, kind, aval in kept]
        return _arrays(results[stored:]), tuple(value for value, *_ in kept)

    shapes: list[tuple[Kind, Any]] = []
    outs = [inner.graph.aval(operand) for operand in inner.graph.outputs]

    @_without_closures(custom)
    def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        values = [*residuals, *cotangents]
        of_given = [*(kind for kind, _ in shapes), *decision.outs]
        types = [*(aval for _, aval in shapes), *outs]
        # Only the dtype changes: inside a shard_map the values vary over axes.
        traced = [
            _as_traced(value, aval) if is_subject(aval, settings.compute) else value
            for value, aval in zip(values, types, strict=True)
        ]
        # Python numbers that the rule has kept are passed to it as they are, and so are symbolic
        # zeros.
        arrays = [
            place
            for place, value in enumerate(traced)
            if hasattr(value, "dtype") and not isinstance(value, SymbolicZero)
        ]

        def flat(*given: Any) -> list[Any]:
            every = list(traced)
            for place, value in zip(arrays, given, strict=True):
                every[place] = value
            return [_dense(value) for value in custom.backward(*every)]

        program = jax.make_jaxpr(flat)(*(traced[place] for place in arrays))
        graph = graph_of(program, node.scope)
        made = plan(graph, [of_given[place] for place in arrays], settings)
        given = [values[place] for place in arrays]
        # All results are wide, because an operand may be a float32 parameter. `_gradients` casts to
        # the dtype of each operand.
        results = run(made, given, [Kind.WIDE] * len(graph.outputs))
        return _gradients(results, avals, operands)

    func.defvjp(forward, backward, symbolic_zeros=is_told)
    return list(func(*operands))


def _arrays(results: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Return results as arrays: some may be numbers that are written into the program.

    JAX hands on the results of a custom rule unchanged, and differentiating a `shard_map` that
    reads one of them fails on NumPy's arrays.
    """
    return tuple(x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results)


def _gradients(
    made: Sequence[Any], avals: Sequence[ShapedArray], operands: Sequence[Any]
) -> tuple[Any, ...]:
    """Return the gradients of all operands; those a rule closes over come first, and are zero."""
    results = [None] * (len(operands) - len(made)) + list(made)
    out = []
    for gradient, aval, value in zip(results, avals, operands, strict=True):
        if not jnp.issubdtype(aval.dtype, jnp.inexact):
            out.append(np.zeros(aval.shape, jax.dtypes.float0))
        elif gradient is None:
            out.append(jnp.zeros_like(value))
        else:
            out.append(jax.lax.convert_element_type(gradient, value.dtype))
    return tuple(out)


@contextlib.contextmanager
def _without_closures(custom: CustomVjp) -> Generator[None]:
    """Say what to do about a rule that uses a value of the function around it.

    JAX traces the rules when the gradient is made. The values that the rules close over belong to
    the trace that autocast has rewritten, which is over by then.
    """
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        name = getattr(custom.function.jaxpr.debug_info, "func_name", "?")
        raise ValueError(
            f"a rule of the custom_vjp function {name!r} uses a value of the function that "
            "autocast rewrites, and not as an argument: it is gone when the gradient is made "
            "(`jax.grad` of `jax.jit` refuses this, too). Give it to the custom_vjp function as an "
            "argument."
        ) from error


def _as_traced(value: ArrayLike | SymbolicZero, aval: ShapedArray) -> ArrayLike | SymbolicZero:
    """Return a value in the dtype for which a rule was written."""
    if isinstance(value, SymbolicZero):
        return SymbolicZero(value.aval.update(dtype=aval.dtype))
    if not hasattr(value, "dtype"):
        return value
    return jax.lax.convert_element_type(value, aval.dtype)


def _dense(value: object) -> object:
    """Return a cotangent as an array, even if it is a symbolic zero."""
    aval = getattr(value, "aval", None)
    if isinstance(value, jax.Array | np.ndarray) or aval is None:
        return value
    return jnp.zeros(aval.shape, aval.dtype)


def _run_custom_vmap(call: Call) -> list[Any]:
    node, decision, run = call.node, call.decision, call.run
    inner, kinds, plan = decision.inner
    custom = node.structured(CustomVmap)
    avals = [inner.graph.avals[number] for number in inner.graph.inputs]

    def rule(size: int, is_mapped: Sequence[bool], values: Sequence[Any]) -> tuple[Any, Any]:
        found: list[bool] = []

        def mapped(*given: Any) -> Sequence[Any]:
            results, found[:] = custom.rule(size, is_mapped, given)
            return results

        # The rule is written for float32, as the function is.
        traced = [
            jax.ShapeDtypeStruct(value.shape, aval.dtype)
            for value, aval in zip(values, avals, strict=True)
        ]
        made = plan(graph_of(jax.make_jaxpr(mapped)(*traced), node.scope), kinds, inner.settings)
        return _arrays(run(made, values, decision.outs)), tuple(found)

    return list(
        custom.bind(
            lambda *values: _arrays(run(inner, values, decision.outs)), rule, *call.operands
        )
    )


PLANNERS = MappingProxyType(
    dict.fromkeys((*CustomJvp.names, *CustomVjp.names, *CustomVmap.names), _plan_custom)
)
RUNNERS = MappingProxyType(
    {
        **dict.fromkeys(CustomJvp.names, _run_custom_jvp),
        **dict.fromkeys(CustomVjp.names, _run_custom_vjp),
        **dict.fromkeys(CustomVmap.names, _run_custom_vmap),
    }
)
