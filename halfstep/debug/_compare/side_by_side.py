"""Run a program in a policy and in float32 side by side, and measure how its values differ."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import PyTree

from halfstep._autocast import (
    Decision,
    Environment,
    Kind,
    Plan,
    Surroundings,
    body_plans,
    carried_operands,
    held,
)
from halfstep._program import (
    Inside,
    Interpreter,
    Node,
    Operand,
    While,
    bind_again,
    run_inside,
)
from halfstep.debug._compare.distance import Sum, absent, added, sums
from halfstep.debug._instrument.body import Body
from halfstep.debug._instrument.layout import Layout

Rows = list[jax.Array]
"""The rows of all sites in order; sites in a loop of known length have an axis for iterations."""


class Pair(NamedTuple):
    """One value of a program in the policy, and the same value in float32."""

    low: Any
    wide: Any


def run_both(
    layout: Layout,
    body: Body,
    plan: Plan,
    values: Sequence[Pair],
    out_kinds: Sequence[Kind],
    slots: Any = None,
) -> tuple[list[Pair], Rows]:
    """Run one function of a program twice, operation by operation.

    Each operation in the policy is given the operands that the policy has computed, so errors add
    up as they do in training. Where control flow depends on values, both runs follow float32.

    Args:
        layout: The sites of the program.
        body: The function.
        plan: How its operations run in the policy.
        values: Its inputs, as the policy holds them and in float32.
        out_kinds: The kinds in which the policy's results are wanted.
        slots: The parts of a recipe's state for the products of the function.
    """
    both = _SideBySide(layout, body, plan, slots)
    both.walk(values)
    pairs = zip(plan.graph.outputs, out_kinds, strict=True)
    made = [
        Pair(both.low.read_as(operand, held(plan, operand, kind)), both.read(operand).wide)
        for operand, kind in pairs
    ]
    return made, both.rows


class _SideBySide(Interpreter[Pair]):
    """Runs every operation as `autocast` does and as it is written, each on its own values."""

    def __init__(self, layout: Layout, body: Body, plan: Plan, slots: Any) -> None:
        super().__init__(plan.graph)
        self.layout, self.body, self.plan, self.slots = layout, body, plan, slots
        self.sites = layout.rows[body]
        # The values in the policy, in the dtypes in which the policy holds and reads them.
        self.low = Environment(plan, Surroundings.WHOLE, slots=slots)
        self.rows: Rows = []

    def constant(self, value: Any) -> Pair:
        return Pair(value, value)

    def operand(self, operand: Operand, index: int) -> Pair:
        return Pair(self.low.operand(operand, index), self.read(operand).wide)

    def write(self, number: int, value: Pair) -> None:
        super().write(number, value)
        self.low.write(number, value.low)
        if number in self.sites:
            self.rows.append(sums(value.low, value.wide))

    def bind(self, index: int, operands: Sequence[Pair]) -> list[Pair]:
        node, decision = self.graph.nodes[index], self.plan.decisions[index]
        bodies = self.body.inner.get(index, ())
        if decision.inner is not None:
            inside = _Compared(node, decision, bodies, self)
            own = None if self.slots is None else self.slots.get(index)
            pairs, rows = run_inside(inside, inside.held(operands), own)
            self.rows += rows
        else:
            low = self.low.bind(index, [value.low for value in operands])
            wide = bind_again(node.primitive, node.params, [value.wide for value in operands])
            pairs = list(map(Pair, low, wide))
            count = sum(map(self.layout.count, bodies))
            self.rows += [absent((len(Sum),))] * count
        return pairs


class _Compared(Inside[Pair, Rows]):
    """The functions inside an operation; each returns its rows in addition to its results."""

    def __init__(
        self, node: Node, decision: Decision, bodies: Sequence[Body], around: _SideBySide
    ) -> None:
        super().__init__(node)
        self.decision, self.bodies, self.around = decision, bodies, around
        self.plans = body_plans(node, decision)

    def held(self, operands: Sequence[Pair]) -> Sequence[Pair]:
        """Cast a loop's operands to the dtypes that the policy carries through all iterations."""
        compute = self.around.plan.settings.compute
        low = [value.low for value in operands]
        low = carried_operands(self.node, self.decision, low, compute)
        return [Pair(new, value.wide) for new, value in zip(low, operands, strict=True)]

    def run(self, number: int, values: Sequence[Pair], state: PyTree) -> tuple[list[Pair], Rows]:
        body, plan, kinds = self.bodies[number], self.plans[number], self.decision.outs
        return run_both(self.around.layout, body, plan, values, kinds, state)

    # Float32 decides a loop's test and the choice of a branch for both sides. If each side decided
    # for itself, a loop could end earlier on one of them, and values would no longer correspond.

    def goes_on(self, values: Sequence[Pair]) -> jax.Array:
        test = jaxpr_as_fun(self.node.structured(While).test)
        return test(*(value.wide for value in values))[0]

    def choice(self, value: Pair) -> jax.Array:
        return value.wide

    # A `scan` stacks the rows of its iterations, which tells in which iteration an error begins. A
    # `while` cannot stack, so its rows are added up; sums of squares add without loss of meaning.

    def before_turns(self, shapes: Callable[[], Rows]) -> Rows:
        return [absent(row.shape) for row in shapes()]

    def after_turn(self, before: Rows, beside: Rows) -> Rows:
        return [added(jnp.stack(pair)) for pair in zip(before, beside, strict=True)]

    def of_branch(self, number: int, beside: Rows, shapes: Callable[[int], Rows]) -> Rows:
        others = (
            beside if other == number else [absent(row.shape) for row in shapes(other)]
            for other in range(len(self.bodies))
        )
        return [row for rows in others for row in rows]

    def of_shards(self, beside: Rows) -> Rows:
        return [added(row) for row in beside]
