"""A plan and where it is: what is around it, and how often it runs."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from halfstep._autocast import _calls, _derivatives, _loops
from halfstep._autocast._graph import Operand, graph_of
from halfstep._autocast._kinds import Kind
from halfstep._autocast._plan import plan as make_plan
from halfstep._autocast._types import Plan, Settings, inner_plans
from halfstep._jaxprs import jaxprs_in

_CALLS = frozenset({*_loops.PLANNERS, *_calls.PLANNERS, *_derivatives.PLANNERS})
# Everything as it is written.
_NO_AUTOCAST = Settings(np.dtype(np.float32), islands=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """A plan within others."""

    plan: Plan
    labels: tuple[str, ...] = ()
    """The loops, branches and calls around it, outermost first."""
    times: int = 1
    """How often it runs, as far as that is known."""
    outer: "Place | None" = None
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


def inside(place: Place, index: int) -> Iterator[Place]:
    """The plans inside of an operation."""
    node, decision = place.plan.graph.nodes[index], place.plan.decisions[index]
    params, ins = node.params, node.ins

    def made(
        plan: Plan, label: str, given: tuple[Operand | None, ...], times: int = 1, number: int = 0
    ) -> Place:
        labels, key = (*place.labels, label), (*place.key, index, number)
        return Place(plan, labels, place.times * times, place, given, key)

    plans = list(inner_plans(decision.inner))
    if not plans:
        yield from _as_written(place, index)
    elif node.name == "scan":
        first, carries = params["num_consts"], params["num_carry"]
        given = (*ins[:first], *[None] * carries, *ins[first + carries :])
        yield made(plans[0], f"scan x{params['length']}", given, params["length"])
    elif node.name == "while":
        consts, split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        carried = [None] * (len(ins) - split)
        yield made(plans[0], "while, test", (*ins[:consts], *carried))
        yield made(plans[1], "while", (*ins[consts:split], *carried), number=1)
    elif node.name == "cond":
        for number, plan in enumerate(plans):
            yield made(plan, f"branch {number}", ins[1:], number=number)
    else:
        for plan in plans:
            yield made(plan, node.name, ins)


def holds_functions(place: Place, index: int) -> bool:
    """Whether an operation is a loop, a branch or a call, and stands as its inside."""
    node, decision = place.plan.graph.nodes[index], place.plan.decisions[index]
    return decision.inner is not None or node.name in _CALLS


def _as_written(place: Place, index: int) -> Iterator[Place]:
    node, decision = place.plan.graph.nodes[index], place.plan.decisions[index]
    length = node.params.get("length", 1) if node.name == "scan" else 1
    for number, function in enumerate(jaxprs_in(node.params)):
        graph = graph_of(function, node.scope)
        plan = make_plan(graph, [Kind.OTHER] * len(graph.inputs), _NO_AUTOCAST)
        yield Place(
            plan,
            (*place.labels, f"scan x{length}" if node.name == "scan" else node.name),
            place.times * length,
            place,
            (None,) * len(graph.inputs),
            (*place.key, index, number),
            by=decision.by or place.by,
        )
