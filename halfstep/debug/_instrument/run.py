"""Run a program and hand out what is recorded of it beside what it returns."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from halfstep._program import Inside, Interpreter, Node, Remat, Scan, bind_again, run_inside
from halfstep.debug._instrument.body import Body
from halfstep.debug._instrument.layout import Layout
from halfstep.debug._instrument.stats import (
    Column,
    Turns,
    after_turn,
    as_rows,
    combined,
    empty,
    no_turns,
    numbers,
)

Results = tuple[list[Any], jax.Array]
"""What a function returns, and its rows."""


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
    recorder = _Recorder(layout, body, compute, detail=detail)
    recorder.walk(values)
    return [recorder.read(operand) for operand in body.graph.outputs], recorder.rows()


class _Recorder(Interpreter[Any]):
    """Runs every operation as it is, and takes the numbers of what it makes at sites."""

    def __init__(self, layout: Layout, body: Body, compute: np.dtype, *, detail: bool) -> None:
        super().__init__(body.graph)
        self.layout, self.body, self.compute, self.detail = layout, body, compute, detail
        self.sites = layout.rows[body]
        # Rows are in the order of a run: those taken here since the last inner function, which are
        # stacked once and not each by itself, and before them whole blocks.
        self.own: list[list[Any]] = []
        self.blocks: list[jax.Array] = []

    def write(self, number: int, value: Any) -> None:
        super().write(number, value)
        if number in self.sites:
            self.own.append(numbers(value, self.compute, detail=self.detail))

    def bind(self, index: int, operands: Sequence[Any]) -> list[Any]:
        node, bodies = self.graph.nodes[index], self.body.inner.get(index, ())
        if not any(map(self.layout.count, bodies)):
            return bind_again(node.primitive, node.params, operands)

        results, rows = run_inside(_Recorded(node, bodies, self), operands)
        self.blocks += [as_rows(self.own, self.layout.loops), rows]
        self.own = []
        return results

    def rows(self) -> jax.Array:
        return jnp.concatenate([*self.blocks, as_rows(self.own, self.layout.loops)])


class _Recorded(Inside[Any, jax.Array]):
    """The functions inside an operation; each hands its rows out beside its results."""

    def __init__(self, node: Node, bodies: Sequence[Body], around: _Recorder) -> None:
        super().__init__(node)
        self.bodies, self.around, self.layout = bodies, around, around.layout

    def run(self, number: int, values: Sequence[Any], state: PyTree) -> Results:
        body, around = self.bodies[number], self.around
        return run(self.layout, body, values, around.compute, detail=around.detail)

    def call(self, structure: Any, operands: Sequence[Any], state: PyTree) -> Results:
        if not isinstance(structure, Remat):
            return self.run(0, operands, state)

        def inside(*values: Any) -> tuple[Any, ...]:
            results, rows = self.run(0, values, state)
            return (*results, rows)

        # The equation is kept as it is: of one that is differentiated already, XLA must not find
        # out that it computes the same as the forward pass.
        *results, rows = structure.bind_as_traced(self.node.primitive, inside, operands)
        return results, rows

    def of_turns(self, loop: Scan, beside: jax.Array) -> jax.Array:
        return combined(beside, self.turn_column) if loop.length else self.nothing(0)

    def before_turns(self, shapes: Callable[[], jax.Array]) -> Turns:
        return no_turns(self.layout.count(self.bodies[0]), self.layout.loops)

    def after_turn(self, before: Turns, beside: jax.Array) -> Turns:
        return after_turn(before, beside, self.turn_column)

    def after_turns(self, last: Turns) -> jax.Array:
        return last.rows

    def of_branch(
        self, number: int, beside: jax.Array, shapes: Callable[[int], jax.Array]
    ) -> jax.Array:
        blocks = [self.nothing(other) for other in range(len(self.bodies))]
        blocks[number] = beside
        return jnp.concatenate(blocks)

    def of_shards(self, beside: jax.Array) -> jax.Array:
        return combined(beside, Column.SHARD)

    @property
    def turn_column(self) -> int:
        """The column of the loop that this operation is."""
        return Column.TURN + len(self.bodies[0].loops) - 1

    def nothing(self, number: int) -> jax.Array:
        """The rows of a function that has not run."""
        return empty(self.layout.count(self.bodies[number]), self.layout.loops)
