"""Loops and branches: their carries and results have one dtype, whichever way is taken."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from halfstep._autocast._graph import Constant, Graph, Node, closed, graph_of
from halfstep._autocast._kinds import Kind, carried, join
from halfstep._autocast._types import (
    FLOAT32,
    Call,
    Decision,
    Plan,
    Planner,
    Settings,
    held_dtype,
    nested,
    out_kinds,
    without_state,
)

# Scan.


def _plan_scan(node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner) -> Decision:
    inner = graph_of(node.params["jaxpr"], node.scope)
    first, carries = node.params["num_consts"], node.params["num_carry"]
    current = list(kinds)
    for position in _accumulators(inner, first, carries):
        current[position] = Kind.WIDE
    while True:
        made = plan(inner, current, settings)
        outs = out_kinds(made)
        stable = [
            carried(before, after)
            for before, after in zip(current[first : first + carries], outs, strict=False)
        ]
        if stable == current[first : first + carries]:
            return nested([*stable, *outs[carries:]], (made, tuple(current)))
        current[first : first + carries] = stable


def _accumulators(inner: Graph, first: int, carries: int) -> list[int]:
    """Carries to which every turn adds and that it does not use otherwise: sums over the turns."""
    found = []
    for number in range(carries):
        value, out = inner.inputs[first + number], inner.outputs[number]
        using = [inner.nodes[index] for index in inner.users[value]]
        dtype = getattr(inner.avals[value], "dtype", None)
        adds = len(using) == 1 and using[0].name in ("add", "add_any", "sub")
        if dtype == FLOAT32 and adds and not isinstance(out, Constant) and out in using[0].outs:
            found.append(first + number)
    return found


def _run_scan(call: Call) -> list[Any]:
    decision, params = call.decision, call.node.params
    inner, kinds = decision.inner
    first, carries = params["num_consts"], params["num_carry"]
    avals = [inner.graph.avals[n] for n in inner.graph.inputs]
    values = hold(call.operands, kinds, avals, call.settings.compute)
    consts, init, xs = values[:first], values[first : first + carries], values[first + carries :]

    def body(carry: Any, turn: Any) -> Any:
        x, own = turn
        results = call.run(inner, [*consts, *carry, *x], decision.outs, slots=own)
        return tuple(results[:carries]), tuple(results[carries:])

    options = (
        {"_split_transpose": params["_split_transpose"]} if "_split_transpose" in params else {}
    )
    carry, ys = jax.lax.scan(
        body,
        tuple(init),
        (tuple(xs), call.slots),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        **options,
    )
    return [*carry, *ys]


def hold(
    values: Sequence[Any], kinds: Sequence[Kind], avals: Sequence[Any], compute: np.dtype
) -> list[Any]:
    """The operands of a loop in the dtypes that kinds stand for."""
    made = []
    for value, kind, aval in zip(values, kinds, avals, strict=True):
        dtype = held_dtype(aval, kind, compute)
        made.append(value if dtype is None else jax.lax.convert_element_type(value, dtype))
    return made


# While.


def _plan_while(node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner) -> Decision:
    params = node.params
    condition = graph_of(params["cond_jaxpr"], node.scope)
    body = graph_of(params["body_jaxpr"], node.scope)
    settings = without_state(settings)
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    of_condition, of_body = list(kinds[: split[0]]), list(kinds[split[0] : split[1]])
    carry = list(kinds[split[1] :])
    for position in _accumulators(body, len(of_body), len(carry)):
        carry[position - len(of_body)] = Kind.WIDE
    while True:
        made = plan(body, [*of_body, *carry], settings)
        stable = [carried(*pair) for pair in zip(carry, out_kinds(made), strict=True)]
        if stable == carry:
            test = plan(condition, [*of_condition, *carry], settings)
            return nested(carry, (test, made, (*of_condition, *of_body, *carry)))
        carry = stable


def _run_while(call: Call) -> list[Any]:
    decision, params, run = call.decision, call.node.params, call.run
    test, body, kinds = decision.inner
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    inputs = test.graph.inputs[: split[0]]
    avals = [test.graph.avals[n] for n in inputs] + [body.graph.avals[n] for n in body.graph.inputs]
    values = hold(call.operands, kinds, avals, call.settings.compute)
    of_condition, of_body, init = (
        values[: split[0]],
        values[split[0] : split[1]],
        values[split[1] :],
    )
    results = jax.lax.while_loop(
        lambda carry: run(test, [*of_condition, *carry], [Kind.OTHER])[0],
        lambda carry: tuple(run(body, [*of_body, *carry], decision.outs)),
        tuple(init),
    )
    return list(results)


# Cond and switch.


def _plan_cond(node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner) -> Decision:
    branches = [
        plan(graph_of(closed(branch), node.scope), kinds[1:], settings)
        for branch in node.params["branches"]
    ]
    outs = [join(kinds) for kinds in zip(*map(out_kinds, branches), strict=True)]
    return nested(outs, tuple(branches))


def _run_cond(call: Call) -> list[Any]:
    decision = call.decision

    def runner(branch: Plan, own: Any) -> Callable[..., Any]:
        return lambda *values: tuple(call.run(branch, values, decision.outs, slots=own))

    given = [None] * len(decision.inner) if call.slots is None else call.slots
    branches = [runner(*pair) for pair in zip(decision.inner, given, strict=True)]
    return list(jax.lax.switch(call.operands[0], branches, *call.operands[1:]))


PLANNERS = MappingProxyType({"scan": _plan_scan, "while": _plan_while, "cond": _plan_cond})
RUNNERS = MappingProxyType({"scan": _run_scan, "while": _run_while, "cond": _run_cond})
