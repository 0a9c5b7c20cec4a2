"""Run a program in a policy and in float32 side by side, and say how far apart its values are."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from halfstep._autocast import (
    Decision,
    Environment,
    Kind,
    Plan,
    Surroundings,
    bind,
    held,
    hold,
    operand_of,
)
from halfstep._program import (
    Cond,
    Constant,
    CustomJvp,
    CustomVjp,
    CustomVmap,
    Jit,
    Node,
    Operand,
    Remat,
    Scan,
    ShardMap,
    While,
    bind_again,
)
from halfstep.debug._compare.distance import Sum, absent, added, sums
from halfstep.debug._instrument.body import Body
from halfstep.debug._instrument.layout import Layout

Rows = list[jax.Array]
"""Of each site in order; those in a loop of known length have an axis for its turns."""


class Both(NamedTuple):
    """Values in the policy, the same values in float32, and the rows of what is between."""

    low: list[Any]
    wide: list[Any]
    rows: Rows


class _Call(NamedTuple):
    """An operation that holds functions, as it is run."""

    node: Node
    decision: Decision
    bodies: tuple[Body, ...]
    low: Sequence[Any]
    wide: Sequence[Any]
    run: Callable[..., Both]
    slots: Any
    plan: Plan


def run_both(
    layout: Layout,
    body: Body,
    plan: Plan,
    low: Sequence[Any],
    wide: Sequence[Any],
    out_kinds: Sequence[Kind],
    slots: Any = None,
) -> Both:
    """Run one function of a program twice, operation by operation.

    Each operation in the policy is given what the policy has made of its operands, so errors add up
    as they do in training. Where a program's way depends on its values, both take that of float32.

    Args:
        layout: The sites of the program.
        body: The function.
        plan: How its operations run in the policy.
        low: Its inputs, held as the policy holds them.
        wide: The same in float32.
        out_kinds: As which kinds the policy's results are wanted.
        slots: What a recipe's state has for its products.
    """
    graph, sites = plan.graph, layout.rows[body]
    env = Environment(plan, Surroundings.WHOLE, slots=slots)
    values: dict[int, Any] = dict(zip(graph.inputs, wide, strict=True))
    values.update(graph.constants)
    for number, value in (*zip(graph.inputs, low, strict=True), *graph.constants):
        env.write(number, value)
    rows: Rows = []

    def read(operand: Operand) -> Any:
        return operand.value if isinstance(operand, Constant) else values[operand]

    def inside(inner: Body, plan: Plan, *args: Any, slots: Any = None) -> Both:
        return run_both(layout, inner, plan, *args, slots=slots)

    def compare(numbers: Sequence[int]) -> None:
        rows.extend(sums(env.values[n], values[n]) for n in numbers if n in sites)

    compare(graph.inputs)
    for index, (node, decision) in enumerate(zip(graph.nodes, plan.decisions, strict=True)):
        operands = [operand_of(env, operand, index) for operand in node.ins]
        exact = [read(operand) for operand in node.ins]
        bodies = body.inner.get(index, ())
        with node.in_scope():
            if decision.inner is None:
                results = bind(env, index, operands), bind_again(node.primitive, node.params, exact)
                count = sum(map(layout.count, bodies))
                rows += [absent((len(Sum),))] * count
            else:
                own = None if slots is None else slots.get(index)
                call = _Call(node, decision, bodies, operands, exact, inside, own, plan)
                *results, found = _RUNNERS[node.name](call)
                rows += found
        for number, made, kind in zip(node.outs, results[0], decision.outs, strict=True):
            dtype = held(plan, number, kind)
            env.write(number, made if dtype is None else jnp.asarray(made, dtype))
        values.update(zip(node.outs, results[1], strict=True))
        compare(node.outs)
    pairs = zip(graph.outputs, out_kinds, strict=True)
    made = [env.read(operand, held(plan, operand, kind)) for operand, kind in pairs]
    return Both(made, [read(operand) for operand in graph.outputs], rows)


def _scan(call: _Call) -> Both:
    (body,), loop = call.bodies, call.node.structured(Scan)
    plan, kinds = call.decision.inner
    low = hold(call.low, kinds, _avals(plan), plan.settings.compute)
    # Constants, carries and what is sliced, each in the policy and in float32.
    parts = zip(loop.split(low), loop.split(call.wide), strict=True)
    consts, init, xs = (tuple(map(tuple, pair)) for pair in parts)
    carries = loop.carries

    def iteration(carry: Any, given: Any) -> Any:
        x, slots = given
        values = ([*consts[n], *carry[n], *x[n]] for n in (0, 1))
        made = call.run(body, plan, *values, call.decision.outs, slots=slots)
        carry = tuple(made.low[:carries]), tuple(made.wide[:carries])
        return carry, (made.low[carries:], made.wide[carries:], made.rows)

    carry, (*ys, rows) = loop.bind(iteration, init, (xs, call.slots))
    return Both([*carry[0], *ys[0]], [*carry[1], *ys[1]], rows)


def _while(call: _Call) -> Both:
    (body,), loop = call.bodies, call.node.structured(While)
    test, plan, kinds = call.decision.inner
    avals = [*_avals(test)[: loop.test_consts], *_avals(plan)]
    _, low, low_init = loop.split(hold(call.low, kinds, avals, plan.settings.compute))
    of_test, wide, wide_init = loop.split(call.wide)
    goes_on = jaxpr_as_fun(loop.test)

    def iteration(carry: Any) -> Both:
        given = [*low, *carry[0]], [*wide, *carry[1]]
        return call.run(body, plan, *given, call.decision.outs)

    def next_state(state: Any) -> Any:
        made = iteration(state[:2])
        both = [added(jnp.stack(pair)) for pair in zip(state[2], made.rows, strict=True)]
        return tuple(made.low), tuple(made.wide), tuple(both)

    carry = tuple(low_init), tuple(wide_init)
    start = tuple(absent(row.shape) for row in jax.eval_shape(iteration, carry).rows)
    low, wide, rows = loop.bind(
        lambda state: goes_on(*of_test, *state[1])[0], next_state, (*carry, start)
    )
    return Both(list(low), list(wide), list(rows))


def _cond(call: _Call) -> Both:
    def branch(number: int) -> Callable[..., Both]:
        def inside(low: Sequence[Any], wide: Sequence[Any]) -> Both:
            slots = None if call.slots is None else call.slots[number]
            body, plan = call.bodies[number], call.decision.inner[number]
            return call.run(body, plan, low, wide, call.decision.outs, slots=slots)

        return inside

    given = list(call.low[1:]), list(call.wide[1:])
    branches = [branch(number) for number in range(len(call.bodies))]
    shapes = [jax.eval_shape(function, *given).rows for function in branches]

    def padded(number: int) -> Callable[..., Both]:
        def inside(low: Sequence[Any], wide: Sequence[Any]) -> Both:
            made = branches[number](low, wide)
            blocks = [[absent(row.shape) for row in rows] for rows in shapes]
            blocks[number] = made.rows
            return Both(made.low, made.wide, [row for rows in blocks for row in rows])

        return inside

    choices = list(map(padded, range(len(branches))))
    return Both(*call.node.structured(Cond).bind(call.wide[0], choices, *given))


def _call(call: _Call) -> Both:
    (body,), inner = call.bodies, call.decision.inner
    plan = inner[0] if isinstance(inner, tuple) else inner
    return call.run(body, plan, call.low, call.wide, call.decision.outs, slots=call.slots)


def _shard_map(call: _Call) -> Both:
    (body,), mapped = call.bodies, call.node.structured(ShardMap)

    def inside(low: Sequence[Any], wide: Sequence[Any]) -> Any:
        made = call.run(body, call.decision.inner, low, wide, call.decision.outs)
        return tuple(made.low), tuple(made.wide), [row[None] for row in made.rows]

    ins, outs = mapped.in_specs, mapped.out_specs
    low, wide, rows = mapped.bind(
        inside,
        tuple(call.low),
        tuple(call.wide),
        in_specs=(ins, ins),
        out_specs=(outs, outs, PartitionSpec(mapped.axes)),
    )
    return Both(list(low), list(wide), [added(row) for row in rows])


def _avals(plan: Plan) -> list[Any]:
    return [plan.graph.avals[number] for number in plan.graph.inputs]


_RUNNERS = MappingProxyType(
    {
        **dict.fromkeys(
            (*Remat.names, *CustomJvp.names, *CustomVjp.names, *CustomVmap.names, *Jit.names), _call
        ),
        **dict.fromkeys(Scan.names, _scan),
        **dict.fromkeys(While.names, _while),
        **dict.fromkeys(Cond.names, _cond),
        **dict.fromkeys(ShardMap.names, _shard_map),
    }
)
