"""Run a program and return its recorded rows in addition to its results."""

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
"""The results of a function, and its rows."""


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
        layout: The layout of the program.
        body: The function.
        values: The values of its inputs.
        compute: The dtype whose range the numbers are compared with.
        detail: Whether to fill the optional columns: range and zeros.
    """
    recorder = _Recorder(layout, body, compute, detail=detail)
    recorder.walk(values)
    return [recorder.read(operand) for operand in body.graph.outputs], recorder.rows()


class _Recorder(Interpreter[Any]):
    """Runs every operation unchanged, and records the numbers of values that are sites."""

    def __init__(self, layout: Layout, body: Body, compute: np.dtype, *, detail: bool) -> None:
        super().__init__(body.graph)
        self.layout, self.body, self.compute, self.detail = layout, body, compute, detail
        self.sites = layout.rows[body]
        # Rows are in the order of a run. `blocks` has the rows up to the last inner function. `own`
        # has the rows since then, which are stacked all at once rather than one by one.
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
    """The functions inside an operation; each returns its rows in addition to its results."""

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

        # The equation is kept as it is: XLA must not find out that an equation that is already
        # differentiated computes the same as the forward pass.
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
        """The column for the iterations of this loop."""
        return Column.TURN + len(self.bodies[0].loops) - 1

    def nothing(self, number: int) -> jax.Array:
        """Return the rows of a function that has not run."""
        return empty(self.layout.count(self.bodies[number]), self.layout.loops)
