"""Calls: what is computed again, what is mapped over a mesh, what says where values lie."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax

from halfstep._autocast._graph import Node, closed, graph_of
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


def _plan_remat(node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner) -> Decision:
    # Inside of what the user recomputes there is nothing to store.
    inner = plan(
        graph_of(closed(node.params["jaxpr"]), node.scope), kinds, without_islands(settings)
    )
    return nested(out_kinds(inner), inner)


def recomputed(node: Node, decision: Decision, run: Runner) -> Callable[..., Any]:
    """What the user recomputes, as a function of a recipe's state and its operands."""
    return jax.checkpoint(
        lambda slots, *values: tuple(run(decision.inner, values, decision.outs, slots=slots)),
        prevent_cse=node.params["prevent_cse"],
        policy=node.params["policy"],
    )


def _plan_call(node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner) -> Decision:
    inner = plan(graph_of(closed(node.params["jaxpr"]), node.scope), kinds, settings)
    return nested(out_kinds(inner), inner)


def _plan_shard_map(
    node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner
) -> Decision:
    return _plan_call(node, kinds, without_state(settings), plan)


def _run_shard_map(call: Call) -> list[Any]:
    decision, params = call.decision, call.node.params
    func = jax.shard_map(
        lambda *values: tuple(call.run(decision.inner, values, decision.outs)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=call.node.manual_axes,
    )
    return list(func(*call.operands))


def _run_jit(call: Call) -> list[Any]:
    decision = call.decision
    func = jax.jit(
        lambda *values: tuple(call.run(decision.inner, values, decision.outs, slots=call.slots)),
        in_shardings=call.node.shardings("in_shardings"),
        out_shardings=call.node.shardings("out_shardings"),
    )
    return list(func(*call.operands))


RECOMPUTED = ("checkpoint", "remat", "remat2")
PLANNERS = MappingProxyType(
    {
        **dict.fromkeys(RECOMPUTED, _plan_remat),
        "shard_map": _plan_shard_map,
        "jit": _plan_call,
        "pjit": _plan_call,
    }
)
RUNNERS = MappingProxyType(
    {
        "shard_map": _run_shard_map,
        "jit": _run_jit,
        "pjit": _run_jit,
    }
)
