"""Run a program and return its recorded rows in addition to its results."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from halfstep._program import (
    Constant,
    Inside,
    Interpreter,
    Node,
    Remat,
    Scan,
    bind_again,
    run_inside,
)
from halfstep.debug._instrument.body import Body
from halfstep.debug._instrument.layout import Layout
from halfstep.debug._instrument.stats import (
    Column,
    Measure,
    Turns,
    after_turn,
    combined,
    empty,
    no_turns,
)

Results = tuple[list[Any], jax.Array]
"""The results of a function, and its rows."""


def run(layout: Layout, body: Body, values: Sequence[Any], measure: Measure) -> Results:
    """Run one function of a program.

    Args:
        layout: The layout of the program.
        body: The function.
        values: The values of its inputs.
        measure: Computes the rows of the values that are sites.
    """
    recorder = _Recorder(layout, body, measure)
    recorder.walk(values)
    return [recorder.read(operand) for operand in body.graph.outputs], recorder.rows()


def run_for_rows(
    layout: Layout, values: Sequence[Any], measure: Measure, *, effects: bool
) -> jax.Array:
    """Run a program for its rows alone: operations that no site depends on are left out.

    XLA would drop these operations too, but only after they were traced and lowered.

    Args:
        layout: The layout of the program.
        values: The arrays of the call.
        measure: Computes the rows of the values that are sites.
        effects: Whether to run operations with effects, such as prints, that no site depends on.
    """
    recorder = _Recorder(layout, layout.body, measure)
    recorder.enter(values)
    for index in _needed(layout, effects=effects):
        recorder.step(index)
    return recorder.rows()


def _needed(layout: Layout, *, effects: bool) -> list[int]:
    """Return the operations of the outermost function that sites depend on, in running order."""
    body, found = layout.body, list[int]()
    needed = set(layout.rows[body])
    for index in range(len(body.graph.nodes) - 1, -1, -1):
        node = body.graph.nodes[index]
        has_sites = any(map(layout.count, body.inner.get(index, ())))
        if has_sites or (effects and node.effects) or not needed.isdisjoint(node.outs):
            found.append(index)
            needed.update(o for o in node.ins if not isinstance(o, Constant))
    return found[::-1]


class _Recorder(Interpreter[Any]):
    """Runs every operation unchanged, and measures the values that are sites."""

    def __init__(self, layout: Layout, body: Body, measure: Measure) -> None:
        super().__init__(body.graph)
        self.layout, self.body, self.measure = layout, body, measure
        self.sites = layout.rows[body]
        # Rows are in the order of a run. `blocks` has the rows up to the last inner function. `own`
        # has the rows since then, which are stacked all at once rather than one by one.
        self.own: list[Any] = []
        self.blocks: list[jax.Array] = []

    def write(self, number: int, value: Any) -> None:
        super().write(number, value)
        if number in self.sites:
            self.own.append(self.measure.of(value, (self.body, number)))

    def bind(self, index: int, operands: Sequence[Any]) -> list[Any]:
        node, bodies = self.graph.nodes[index], self.body.inner.get(index, ())
        if not any(map(self.layout.count, bodies)):
            return bind_again(node.primitive, node.params, operands)

        results, rows = run_inside(_Recorded(node, bodies, self), operands)
        self.blocks += [self.measure.rows(self.own, self.layout.loops), rows]
        self.own = []
        return results

    def rows(self) -> jax.Array:
        own = self.measure.rows(self.own, self.layout.loops)
        return jnp.concatenate([*self.blocks, own])


class _Recorded(Inside[Any, jax.Array]):
    """The functions inside an operation; each returns its rows in addition to its results."""

    def __init__(self, node: Node, bodies: Sequence[Body], around: _Recorder) -> None:
        super().__init__(node)
        self.bodies, self.around, self.layout = bodies, around, around.layout

    def run(self, number: int, values: Sequence[Any], state: PyTree) -> Results:
        return run(self.layout, self.bodies[number], values, self.around.measure)

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
