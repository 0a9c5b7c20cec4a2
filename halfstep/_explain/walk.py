"""List all operations of a plan and of the plans inside it."""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
from jax.core import AbstractValue

from halfstep._autocast import (
    CONTRACTIONS,
    FLOAT32,
    Kind,
    Plan,
    RecipeProduct,
    Region,
    Rule,
    held_dtype,
    schedule,
)
from halfstep._explain.entries import ExplainEntry, typed
from halfstep._explain.flops import inside_flops, operation_flops
from halfstep._explain.places import PlanPlace
from halfstep._explain.reasons import multiplies, parameter, reason
from halfstep._program import Finder, Node, Source, functions_in, is_of_jax


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One operation: its plan, its number in the plan, and what is known about it."""

    place: PlanPlace
    index: int
    entry: ExplainEntry

    @property
    def node(self) -> Node:
        """The operation as it was traced."""
        return self.place.plan.graph.nodes[self.index]


def walk(place: PlanPlace, finder: Finder) -> list[Step]:
    """List all operations; those inside a loop or a call stand in its place."""
    return list(_walk(place, finder, itertools.count(1), None))


def _walk(
    place: PlanPlace, finder: Finder, islands: Iterator[int], line: Source | None
) -> Iterator[Step]:
    numbers = _islands(place.plan, islands)
    for index, node in enumerate(place.plan.graph.nodes):
        source = line or finder.find(node.source.traceback)
        if not place.holds_functions(index):
            entry = _entry(place, index, source, numbers.get(index), finder)
            yield Step(place, index, entry)
            continue
        # JAX's own functions with custom derivatives (relu) get the line that calls them.
        of_jax = any(is_of_jax(inner.jaxpr) for inner in functions_in(node.name, node.params))
        for inner in place.inside(index):
            yield from _walk(inner, finder, islands, source if of_jax else line)


def _islands(plan: Plan, numbers: Iterator[int]) -> dict[int, int]:
    """Return the number of the island that each operation is in."""
    # Outputs are as `autocast` wants them; otherwise the islands would differ from those that run.
    found: dict[int, int] = {}
    for unit in schedule(plan, [Kind.WIDE] * len(plan.graph.outputs)):
        if isinstance(unit, Region) and not unit.has_names:
            number = next(numbers)
            found.update(dict.fromkeys(unit.nodes, number))
    return found


def _entry(
    place: PlanPlace, index: int, source: Source, island: int | None, finder: Finder
) -> ExplainEntry:
    plan = place.plan
    node, decision = plan.graph.nodes[index], plan.decisions[index]
    ins = [plan.graph.aval(operand) for operand in node.ins]
    outs = [plan.graph.avals[number] for number in node.outs]
    contracts = node.name in CONTRACTIONS
    in_f8 = decision.site is not None and multiplies(decision.site)
    why = reason(place, index, finder)
    return ExplainEntry(
        name=node.name,
        source=source,
        scope=node.scope,
        within=place.labels,
        ins=tuple(typed(aval, taken(plan, index, position)) for position, aval in enumerate(ins)),
        outs=tuple(
            typed(aval, made(plan, index, kind, aval))
            for aval, kind in zip(outs, decision.outs, strict=True)
        ),
        rule=decision.rule.value,
        reason=why,
        by=decision.by or place.by,
        island=island,
        count=place.times,
        flops=operation_flops(node.name, node.params, ins, outs),
        is_contraction=contracts,
        parameter=parameter(place, index) if contracts else "",
        in_f8=in_f8,
        refusal=why if decision.site is not None and not in_f8 else decision.refusal,
        inside_flops=inside_flops(node.name, node.params, ins, outs),
    )


def taken(plan: Plan, index: int, position: int) -> np.dtype | None:
    """Return the dtype in which an operation takes an operand; `None` if it is as written."""
    node, decision = plan.graph.nodes[index], plan.decisions[index]
    operand = node.ins[position]
    if decision.site is not None and multiplies(decision.site) and position < 2:
        return _factor_dtypes(decision.site)[position]
    held = held_dtype(plan.graph.aval(operand), plan.seen(operand, index), plan.settings.compute)
    # A rule's own function decides about operands itself, and a conversion takes its operand as it
    # is. All other operations are given their operands in the dtype that was decided.
    if held is None or decision.function is not None or node.name == "convert_element_type":
        return held
    return decision.dtype


def made(plan: Plan, index: int, kind: Kind, aval: AbstractValue) -> np.dtype | None:
    """Return the dtype in which an operation makes a result; `None` if it is as written."""
    decision = plan.decisions[index]
    held = held_dtype(aval, kind, plan.settings.compute)
    if held is None or decision.rule is Rule.AS_TRACED or decision.function is not None:
        return held
    # A contraction may take 16-bit operands and hand its sum on in float32 (`accumulate`).
    wide = kind in (Kind.WIDE, Kind.KEPT) and decision.rule is Rule.COMPUTE
    return FLOAT32 if wide else decision.dtype


def _factor_dtypes(site: RecipeProduct) -> tuple[np.dtype, np.dtype]:
    """Return the formats of both factors of the forward product, in their order."""
    activation, weight = (factor.dtype for factor in site.recipe.forward)
    return (activation, weight) if site.weight == 1 else (weight, activation)
