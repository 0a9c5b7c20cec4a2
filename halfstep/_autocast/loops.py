"""Loops and branches: their carries and results have one dtype, whichever way is taken."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from halfstep._autocast.kinds import Kind, carried, join
from halfstep._autocast.types import (
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
from halfstep._base import cast
from halfstep._program import Cond, Constant, Graph, Node, Scan, While, graph_of

# Scan.


def _plan_scan(node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner) -> Decision:
    loop = node.structured(Scan)
    inner = graph_of(loop.body, node.scope)
    first, carries = loop.consts, loop.carries
    # A carry has one dtype in all turns, and which one depends on what the body makes of it, which
    # depends on the dtype it comes in with. So the body is planned until carries leave it as they
    # entered it. `carried` only ever widens a kind, and there are few: this ends after as many
    # rounds as a carry has kinds to pass through, most often two.
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
    # A sum of many turns in 16 bits stalls: once it is 256 times what is added, bfloat16 rounds
    # every addition away. These are float32, whatever is added to them.
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
    decision, loop = call.decision, call.node.structured(Scan)
    inner, kinds = decision.inner
    avals = [inner.graph.avals[n] for n in inner.graph.inputs]
    values = hold(call.operands, kinds, avals, call.settings.compute)
    consts, init, xs = loop.split(values)

    def body(carry: Any, given: Any) -> Any:
        x, own = given
        results = call.run(inner, [*consts, *carry, *x], decision.outs, slots=own)
        return tuple(results[: loop.carries]), tuple(results[loop.carries :])

    carry, ys = loop.bind(body, tuple(init), (tuple(xs), call.slots))
    return [*carry, *ys]


def hold(
    values: Sequence[Any], kinds: Sequence[Kind], avals: Sequence[Any], compute: np.dtype
) -> list[Any]:
    """The operands of a loop in the dtypes that kinds stand for."""
    made = []
    for value, kind, aval in zip(values, kinds, avals, strict=True):
        dtype = held_dtype(aval, kind, compute)
        made.append(value if dtype is None else cast(value, dtype))
    return made


# While.


def _plan_while(node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner) -> Decision:
    loop = node.structured(While)
    condition, body = graph_of(loop.test, node.scope), graph_of(loop.body, node.scope)
    settings = without_state(settings)
    of_condition, of_body, carry = map(list, loop.split(kinds))
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
    decision, loop, run = call.decision, call.node.structured(While), call.run
    test, body, kinds = decision.inner
    inputs = test.graph.inputs[: loop.test_consts]
    avals = [test.graph.avals[n] for n in inputs] + [body.graph.avals[n] for n in body.graph.inputs]
    values = hold(call.operands, kinds, avals, call.settings.compute)
    of_condition, of_body, init = loop.split(values)
    results = loop.bind(
        lambda carry: run(test, [*of_condition, *carry], [Kind.OTHER])[0],
        lambda carry: tuple(run(body, [*of_body, *carry], decision.outs)),
        tuple(init),
    )
    return list(results)


# Cond and switch.


def _plan_cond(node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner) -> Decision:
    branches = [
        plan(graph_of(branch, node.scope), kinds[1:], settings)
        for branch in node.structured(Cond).branches
    ]
    outs = [join(kinds) for kinds in zip(*map(out_kinds, branches), strict=True)]
    return nested(outs, tuple(branches))


def _run_cond(call: Call) -> list[Any]:
    decision = call.decision

    def runner(branch: Plan, own: Any) -> Callable[..., Any]:
        return lambda *values: tuple(call.run(branch, values, decision.outs, slots=own))

    given = [None] * len(decision.inner) if call.slots is None else call.slots
    branches = [runner(*pair) for pair in zip(decision.inner, given, strict=True)]
    index, *values = call.operands
    return list(call.node.structured(Cond).bind(index, branches, *values))


PLANNERS = MappingProxyType(
    {
        **dict.fromkeys(Scan.names, _plan_scan),
        **dict.fromkeys(While.names, _plan_while),
        **dict.fromkeys(Cond.names, _plan_cond),
    }
)
RUNNERS = MappingProxyType(
    {
        **dict.fromkeys(Scan.names, _run_scan),
        **dict.fromkeys(While.names, _run_while),
        **dict.fromkeys(Cond.names, _run_cond),
    }
)
