"""Calls: what is computed again, what is mapped over a mesh, what says where values lie."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

from halfstep._autocast._graph import Node, graph_of
from halfstep._autocast._kinds import Kind
from halfstep._autocast._types import (
    Call,
    Decision,
    Planner,
    Runner,
    Settings,
    nested,
    out_kinds,
    without_islands,
    without_state,
)
from halfstep._program.structures import Jit, Remat, ShardMap


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


RECOMPUTED = Remat.names
PLANNERS = MappingProxyType(
    {
        **dict.fromkeys(RECOMPUTED, _plan_remat),
        **dict.fromkeys(ShardMap.names, _plan_shard_map),
        **dict.fromkeys(Jit.names, _plan_call),
    }
)
RUNNERS = MappingProxyType(
    {**dict.fromkeys(ShardMap.names, _run_shard_map), **dict.fromkeys(Jit.names, _run_jit)}
)
