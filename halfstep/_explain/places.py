"""Locate a plan: what is around it, and how often it runs."""

import dataclasses

import numpy as np

from halfstep._autocast import Again, Kind, Plan, Saves, Settings, inner_plans, plan as make_plan
from halfstep._program import Inner, Node, Operand, graph_of

# Everything runs as it is written.
_NO_AUTOCAST = Settings(np.dtype(np.float32), saves=Saves(again=Again.NOTHING))


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
    """The operand of the plan around it that each input is; `None` for what a loop carries."""
    key: tuple[int, ...] = ()
    """For each plan around it: the number of the operation, and of the function in it."""
    paths: tuple[str, ...] = ()
    """The path of each input in the call, for the outermost plan."""
    by: str = ""
    """The user's rule by which all of it runs as it is written."""
    _inside: dict[int, "tuple[PlanPlace, ...]"] = dataclasses.field(
        default_factory=dict, init=False, repr=False
    )
    """The results of `inside`: a function that is left as written is planned there, once."""

    def kind(self, index: int, operand: Operand) -> Kind:
        """Return the kind of an operand of an operation."""
        return self.plan.seen(operand, index)

    def producer(self, operand: Operand) -> int | None:
        """Return the operation of this plan that makes a value, if one does."""
        return self.plan.maker(operand)

    def input_position(self, operand: Operand) -> int | None:
        """Return which input of the plan a value is, if it is one."""
        inputs = self.plan.graph.inputs
        return inputs.index(operand) if operand in inputs else None

    def holds_functions(self, index: int) -> bool:
        """Return whether an operation is a loop, a branch or a call, which has plans inside."""
        if self.plan.decisions[index].inner is not None:
            return True
        return self.plan.graph.nodes[index].is_call

    def inside(self, index: int) -> tuple["PlanPlace", ...]:
        """Return the plans inside an operation."""
        if index not in self._inside:
            node = self.plan.graph.nodes[index]
            calls = () if node.structure is None else node.structure.inner()
            plans = tuple(inner_plans(self.plan.decisions[index].inner))
            pairs = zip(plans, calls, strict=True) if plans else ((None, call) for call in calls)
            self._inside[index] = tuple(
                self._place_of(index, number, plan, call)
                for number, (plan, call) in enumerate(pairs)
            )
        return self._inside[index]

    def _place_of(self, index: int, number: int, plan: Plan | None, call: Inner) -> "PlanPlace":
        node = self.plan.graph.nodes[index]
        given, by = _given(node, call), ""
        if plan is None:
            # `autocast` leaves the inside as it is written. It is planned here, with settings that
            # lower nothing, so that its operations are listed and counted like all others.
            graph = graph_of(call.function, node.scope)
            plan = make_plan(graph, [Kind.OTHER] * len(graph.inputs), _NO_AUTOCAST)
            given, by = (None,) * len(graph.inputs), self.plan.decisions[index].by or self.by
        return PlanPlace(
            plan,
            (*self.labels, call.label),
            self.times * call.times,
            self,
            given,
            (*self.key, index, number),
            by=by,
        )


def _given(node: Node, call: Inner) -> tuple[Operand | None, ...]:
    """Return the operand that each input of a function is; `None` for what a loop carries."""
    operands = call.operands or ()
    return tuple(
        None if position in call.carried else node.ins[operand]
        for position, operand in enumerate(operands)
    )
