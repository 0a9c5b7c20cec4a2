"""Calls: what is computed again, what is mapped over a mesh, what says where values lie."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax

from halfstep._autocast.kinds import Kind
from halfstep._autocast.types import (
    Call,
    Decision,
    Planner,
    Runner,
    Settings,
    nested,
    out_kinds,
    with_own_rules,
    without_islands,
    without_state,
)
from halfstep._program import CustomVmap, Jit, Node, Remat, ShardMap, graph_of


def _plan_remat(node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner) -> Decision:
    # Inside of what the user recomputes there is nothing to store.
    function = node.structured(Remat).function
    inner = plan(graph_of(function, node.scope), kinds, without_islands(settings))
    return nested(out_kinds(inner), inner)


def recomputed(node: Node, decision: Decision, run: Runner) -> Callable[..., Any]:
    """What the user recomputes, as a function of a recipe's state and its operands."""
    return node.structured(Remat).checkpoint(
        lambda slots, *values: tuple(run(decision.inner, values, decision.outs, slots=slots))
    )


def _plan_call(node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner) -> Decision:
    function = node.structured(Jit, ShardMap).function
    inner = plan(graph_of(function, node.scope), kinds, settings)
    return nested(out_kinds(inner), inner)


def _plan_shard_map(
    node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner
) -> Decision:
    return _plan_call(node, kinds, without_state(settings), plan)


def _run_shard_map(call: Call) -> list[Any]:
    decision = call.decision
    results = call.node.structured(ShardMap).bind(
        lambda *values: tuple(call.run(decision.inner, values, decision.outs)), *call.operands
    )
    return list(results)


def _run_jit(call: Call) -> list[Any]:
    decision = call.decision
    results = call.node.structured(Jit).bind(
        lambda *values: tuple(call.run(decision.inner, values, decision.outs, slots=call.slots)),
        *call.operands,
    )
    return list(results)


def _plan_custom_vmap(
    node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner
) -> Decision:
    function = node.structured(CustomVmap).function
    inner = plan(graph_of(function, node.scope), kinds, with_own_rules(settings))
    return nested(out_kinds(inner), (inner, tuple(kinds), plan))


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
        return tuple(run(made, values, decision.outs)), tuple(found)

    return list(
        custom.bind(lambda *values: tuple(run(inner, values, decision.outs)), rule, *call.operands)
    )


RECOMPUTED = Remat.names
PLANNERS = MappingProxyType(
    {
        **dict.fromkeys(RECOMPUTED, _plan_remat),
        **dict.fromkeys(ShardMap.names, _plan_shard_map),
        **dict.fromkeys(Jit.names, _plan_call),
        **dict.fromkeys(CustomVmap.names, _plan_custom_vmap),
    }
)
RUNNERS = MappingProxyType(
    {
        **dict.fromkeys(ShardMap.names, _run_shard_map),
        **dict.fromkeys(Jit.names, _run_jit),
        **dict.fromkeys(CustomVmap.names, _run_custom_vmap),
    }
)
