"""A plan and where it is: what is around it, and how often it runs."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from halfstep._autocast import Kind, Plan, Settings, inner_plans, plan as make_plan
from halfstep._program import Inner, Node, Operand, graph_of

# Everything as it is written.
_NO_AUTOCAST = Settings(np.dtype(np.float32), islands=False)


@dataclasses.dataclass(frozen=True, eq=False)
class PlanPlace:
    """A plan within others."""

    plan: Plan
    labels: tuple[str, ...] = ()
    """The loops, branches and calls around it, outermost first."""
    times: int = 1
    """How often it runs, as far as that is known."""
    outer: "PlanPlace | None" = None
    given: tuple[Operand | None, ...] = ()
    """What of the plan around it each input is; `None` for what a loop carries."""
    key: tuple[int, ...] = ()
    """Which operation of the plan around it it is in, and which function of it; and so on."""
    paths: tuple[str, ...] = ()
    """Of the outermost plan: where in the call each input is."""
    by: str = ""
    """The rule of the user's by which all of it runs as it is written."""

    def kind(self, index: int, operand: Operand) -> Kind:
        """The kind of an operand of an operation."""
        return self.plan.seen(operand, self.plan.levels[index])

    def producer(self, operand: Operand) -> int | None:
        """The operation of this plan that makes a value, if one does."""
        return self.plan.maker(operand)

    def input_position(self, operand: Operand) -> int | None:
        """Which input of the plan a value is, if it is one."""
        inputs = self.plan.graph.inputs
        return inputs.index(operand) if operand in inputs else None


def inside(place: PlanPlace, index: int) -> Iterator[PlanPlace]:
    """The plans inside of an operation."""
    node, decision = place.plan.graph.nodes[index], place.plan.decisions[index]
    plans = list(inner_plans(decision.inner))
    if not plans:
        yield from _as_written(place, index)
        return
    structure = node.structure
    calls = () if structure is None else structure.inner()
    for number, (plan, call) in enumerate(zip(plans, calls, strict=True)):
        labels, key = (*place.labels, call.label), (*place.key, index, number)
        yield PlanPlace(plan, labels, place.times * call.times, place, _given(node, call), key)


def _given(node: Node, call: Inner) -> tuple[Operand | None, ...]:
    """The operand that each input of a function is; `None` for what a loop carries."""
    operands = call.operands or ()
    return tuple(
        None if position in call.carried else node.ins[operand]
        for position, operand in enumerate(operands)
    )


def holds_functions(place: PlanPlace, index: int) -> bool:
    """Whether an operation is a loop, a branch or a call, and stands as its inside."""
    node, decision = place.plan.graph.nodes[index], place.plan.decisions[index]
    if decision.inner is not None:
        return True
    return node.structure is not None and not node.structure.is_opaque


def _as_written(place: PlanPlace, index: int) -> Iterator[PlanPlace]:
    node, decision = place.plan.graph.nodes[index], place.plan.decisions[index]
    structure = node.structure
    for number, call in enumerate(() if structure is None else structure.inner()):
        graph = graph_of(call.function, node.scope)
        plan = make_plan(graph, [Kind.OTHER] * len(graph.inputs), _NO_AUTOCAST)
        yield PlanPlace(
            plan,
            (*place.labels, call.label),
            place.times * call.times,
            place,
            (None,) * len(graph.inputs),
            (*place.key, index, number),
            by=decision.by or place.by,
        )
