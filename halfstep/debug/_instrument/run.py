"""Run a program and hand out what is recorded of it beside what it returns."""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec

from halfstep._program import (
    Cond,
    Constant,
    CustomJvp,
    CustomVjp,
    CustomVmap,
    Jit,
    Node,
    Remat,
    Scan,
    ShardMap,
    While,
    bind_again,
)
from halfstep.debug._instrument.body import Body
from halfstep.debug._instrument.layout import Layout
from halfstep.debug._instrument.stats import Column, after_turn, as_rows, combined, empty, numbers

Results = tuple[list[Any], jax.Array]
"""What a function returns, and its rows."""


class _Call(NamedTuple):
    """An operation that holds functions, as it is run."""

    node: Node
    bodies: tuple[Body, ...]
    operands: Sequence[Any]
    run: Callable[[Body, Sequence[Any]], Results]
    layout: Layout

    def counts(self) -> list[int]:
        """How many rows each function has."""
        return [self.layout.count(body) for body in self.bodies]


def run(
    layout: Layout,
    body: Body,
    values: Sequence[Any],
    compute: np.dtype,
    *,
    detail: bool = False,
) -> Results:
    """Run one function of a program.

    Args:
        layout: Of the program.
        body: The function.
        values: Of its inputs.
        compute: The dtype whose range the numbers are compared with.
        detail: Whether rows have the columns that are taken only if they are asked for.
    """
    graph, sites = body.graph, layout.rows[body]
    env: dict[int, Any] = dict(zip(graph.inputs, values, strict=True))
    env.update(graph.constants)
    own: list[list[Any]] = []
    blocks: list[jax.Array] = []

    def read(operand: Any) -> Any:
        return operand.value if isinstance(operand, Constant) else env[operand]

    def record(made: Sequence[int]) -> None:
        for number in made:
            if number in sites:
                own.append(numbers(env[number], compute, detail=detail))

    def inside(inner: Body, values: Sequence[Any]) -> Results:
        return run(layout, inner, values, compute, detail=detail)

    record(graph.inputs)
    for index, node in enumerate(graph.nodes):
        operands = [read(operand) for operand in node.ins]
        bodies = body.inner.get(index, ())
        with node.in_scope():
            if any(map(layout.count, bodies)):
                call = _Call(node, bodies, operands, inside, layout)
                results, rows = _RUNNERS[node.name](call)
                blocks += [as_rows(own, layout.loops), rows]
                own = []
            else:
                results = bind_again(node.primitive, node.params, operands)
            env.update(zip(node.outs, results, strict=True))
            record(node.outs)
    rows = jnp.concatenate([*blocks, as_rows(own, layout.loops)])
    return [read(operand) for operand in graph.outputs], rows


def _turn_column(body: Body) -> int:
    """The column of the innermost loop that a function is the inside of."""
    return Column.TURN + len(body.loops) - 1


def _scan(call: _Call) -> Results:
    (body,), loop = call.bodies, call.node.structured(Scan)
    consts, init, xs = loop.split(call.operands)

    def iteration(carry: Any, x: Any) -> Any:
        results, rows = call.run(body, [*consts, *carry, *x])
        return tuple(results[: loop.carries]), (tuple(results[loop.carries :]), rows)

    carry, (ys, rows) = loop.bind(iteration, tuple(init), tuple(xs))
    if loop.length:
        rows = combined(rows, _turn_column(body))
    else:
        rows = empty(sum(call.counts()), call.layout.loops)
    return [*carry, *ys], rows


def _while(call: _Call) -> Results:
    (body,), loop = call.bodies, call.node.structured(While)
    of_test, of_body, init = loop.split(call.operands)
    test = jaxpr_as_fun(loop.test)
    start = empty(sum(call.counts()), call.layout.loops)

    def iteration(state: Any) -> Any:
        number, before, carry = state
        results, rows = call.run(body, [*of_body, *carry])
        rows = after_turn(before, rows, number, _turn_column(body))
        return number + 1, rows, tuple(results)

    _, rows, results = loop.bind(
        lambda state: test(*of_test, *state[2])[0], iteration, (jnp.int32(0), start, tuple(init))
    )
    return list(results), rows


def _cond(call: _Call) -> Results:
    counts = call.counts()

    def branch(number: int) -> Callable[..., Any]:
        def inside(*values: Any) -> Any:
            results, rows = call.run(call.bodies[number], values)
            blocks = [empty(count, call.layout.loops) for count in counts]
            blocks[number] = rows
            return tuple(results), jnp.concatenate(blocks)

        return inside

    branches = [branch(number) for number in range(len(counts))]
    index, *values = call.operands
    results, rows = call.node.structured(Cond).bind(index, branches, *values)
    return list(results), rows


def _remat(call: _Call) -> Results:
    (body,) = call.bodies

    def inside(*values: Any) -> tuple[Any, ...]:
        results, rows = call.run(body, values)
        return (*results, rows)

    # The equation is kept as it is: of one that is differentiated already, XLA must not find out
    # that it computes the same as the forward pass.
    *results, rows = call.node.structured(Remat).bind_as_traced(
        call.node.primitive, inside, call.operands
    )
    return results, rows


def _call(call: _Call) -> Results:
    (body,) = call.bodies
    return call.run(body, call.operands)


def _jit(call: _Call) -> Results:
    (body,) = call.bodies

    def inside(*values: Any) -> Any:
        results, rows = call.run(body, values)
        return tuple(results), rows

    results, rows = call.node.structured(Jit).bind(inside, *call.operands, more=(None,))
    return list(results), rows


def _shard_map(call: _Call) -> Results:
    (body,), mapped = call.bodies, call.node.structured(ShardMap)

    def inside(*values: Any) -> Any:
        results, rows = call.run(body, values)
        return tuple(results), rows[None]

    out_specs = (mapped.out_specs, PartitionSpec(mapped.axes))
    results, rows = mapped.bind(inside, *call.operands, out_specs=out_specs)
    return list(results), combined(rows, Column.SHARD)


_RUNNERS = MappingProxyType(
    {
        **dict.fromkeys(Remat.names, _remat),
        **dict.fromkeys((*CustomJvp.names, *CustomVjp.names, *CustomVmap.names), _call),
        **dict.fromkeys(Scan.names, _scan),
        **dict.fromkeys(While.names, _while),
        **dict.fromkeys(Cond.names, _cond),
        **dict.fromkeys(Jit.names, _jit),
        **dict.fromkeys(ShardMap.names, _shard_map),
    }
)
