"""Run a program and hand out what is recorded of it beside what it returns."""

from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from halfstep._autocast._graph import Constant, Node
from halfstep._autocast._run import bind_params
from halfstep.debug._body import DERIVATIVES, REMATS, Body
from halfstep.debug._layout import Layout
from halfstep.debug._stats import Column, after_turn, as_rows, combined, empty, numbers

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
                results = bind_as_traced(node, operands)
            env.update(zip(node.outs, results, strict=True))
            record(node.outs)
    rows = jnp.concatenate([*blocks, as_rows(own, layout.loops)])
    return [read(operand) for operand in graph.outputs], rows


def bind_as_traced(node: Node, operands: Sequence[Any]) -> Iterable[Any]:
    """Run an operation as it was traced."""
    subfuns, params = bind_params(node.primitive, dict(node.params))
    results = node.primitive.bind(*subfuns, *operands, **params)
    return results if node.primitive.multiple_results else [results]


def _turn_column(body: Body) -> int:
    """The column of the innermost loop that a function is the inside of."""
    return Column.TURN + len(body.loops) - 1


def _scan(call: _Call) -> Results:
    (body,), params = call.bodies, call.node.params
    first, carries = params["num_consts"], params["num_carry"]
    consts, init = call.operands[:first], call.operands[first : first + carries]
    xs = call.operands[first + carries :]

    def turn(carry: Any, x: Any) -> Any:
        results, rows = call.run(body, [*consts, *carry, *x])
        return tuple(results[:carries]), (tuple(results[carries:]), rows)

    options = {name: params[name] for name in ("_split_transpose",) if name in params}
    carry, (ys, rows) = jax.lax.scan(
        turn,
        tuple(init),
        tuple(xs),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
        **options,
    )
    if params["length"]:
        rows = combined(rows, _turn_column(body))
    else:
        rows = empty(sum(call.counts()), call.layout.loops)
    return [*carry, *ys], rows


def _while(call: _Call) -> Results:
    (body,), params = call.bodies, call.node.params
    tests, consts = params["cond_nconsts"], params["body_nconsts"]
    of_test, of_body = call.operands[:tests], call.operands[tests : tests + consts]
    test = core.jaxpr_as_fun(params["cond_jaxpr"])
    start = empty(sum(call.counts()), call.layout.loops)

    def turn(state: Any) -> Any:
        number, before, carry = state
        results, rows = call.run(body, [*of_body, *carry])
        rows = after_turn(before, rows, number, _turn_column(body))
        return number + 1, rows, tuple(results)

    state = (jnp.int32(0), start, tuple(call.operands[tests + consts :]))
    _, rows, results = jax.lax.while_loop(lambda state: test(*of_test, *state[2])[0], turn, state)
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
    results, rows = jax.lax.switch(call.operands[0], branches, *call.operands[1:])
    return list(results), rows


def _remat(call: _Call) -> Results:
    (body,) = call.bodies

    def inside(*values: Any) -> tuple[Any, ...]:
        results, rows = call.run(body, values)
        return (*results, rows)

    # The equation is kept as it is: of one that is differentiated already, XLA must not find out
    # that it computes the same as the forward pass.
    made = jax.make_jaxpr(inside)(*call.operands)
    params = {**call.node.params, "jaxpr": made.jaxpr}
    *results, rows = call.node.primitive.bind(*call.operands, **params)
    return results, rows


def _call(call: _Call) -> Results:
    (body,) = call.bodies
    return call.run(body, call.operands)


def _jit(call: _Call) -> Results:
    (body,) = call.bodies

    def inside(*values: Any) -> Any:
        results, rows = call.run(body, values)
        return tuple(results), rows

    func = jax.jit(
        inside,
        in_shardings=call.node.shardings("in_shardings"),
        out_shardings=(call.node.shardings("out_shardings"), None),
    )
    results, rows = func(*call.operands)
    return list(results), rows


def _shard_map(call: _Call) -> Results:
    (body,), params = call.bodies, call.node.params
    manual = call.node.manual_axes
    axes = tuple(name for name in params["mesh"].axis_names if name in manual)

    def inside(*values: Any) -> Any:
        results, rows = call.run(body, values)
        return tuple(results), rows[None]

    func = jax.shard_map(
        inside,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(tuple(params["out_specs"]), PartitionSpec(axes)),
        check_vma=params["check_vma"],
        axis_names=manual,
    )
    results, rows = func(*call.operands)
    return list(results), combined(rows, Column.SHARD)


_RUNNERS = MappingProxyType(
    {
        **dict.fromkeys(REMATS, _remat),
        **dict.fromkeys(DERIVATIVES, _call),
        "scan": _scan,
        "while": _while,
        "cond": _cond,
        "jit": _jit,
        "pjit": _jit,
        "shard_map": _shard_map,
    }
)
