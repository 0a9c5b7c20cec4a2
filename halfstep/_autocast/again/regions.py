"""Gather what is made again into regions, and put regions and operations into an order.

A region runs as one function. Its inside is computed once more in the backward pass, from values
that are stored. `islands` and `segments` say which operations go together, and `recompute` how XLA
is kept from merging the two computations.
"""

import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from halfstep._autocast.again.islands import alone, before_calls, islands
from halfstep._autocast.again.segments import segments
from halfstep._autocast.again.surroundings import Surroundings
from halfstep._autocast.kinds import Kind
from halfstep._autocast.plans import FLOAT32, Plan, held_dtype
from halfstep._autocast.primitives import CONTRACTIONS, Rule
from halfstep._autocast.stored.saves import Again
from halfstep._program import Constant


@dataclasses.dataclass(frozen=True)
class Region:
    """Operations that run together, and are made again together."""

    nodes: tuple[int, ...]
    reads: tuple[tuple[int, np.dtype | None], ...]
    """The values that come in, each with the dtype it is held in."""
    outputs: tuple[tuple[int, np.dtype | None], ...]
    """The values that go out, each with the dtype it is held in; a value may go out in both."""
    is_last: bool
    """Whether neither a contraction nor anything that may contain one comes after it."""
    has_names: bool
    """Whether values inside are stored, under names that its `jax.checkpoint` saves."""
    is_alone: bool = False
    """Whether XLA may merge its two computations, since it is far larger than all others."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the values that come in."""
        return tuple(number for number, _ in self.reads)


def schedule(
    plan: Plan, out_kinds: Sequence[Kind], place: Surroundings = Surroundings.WHOLE
) -> list[int | Region]:
    """Return operations and regions in an order in which they can run.

    Args:
        plan: The plan to run.
        out_kinds: The kinds in which its outputs are wanted.
        place: Where it runs.
    """
    if plan.settings.saves.again is Again.MOST:
        order: list[int | Region] = []
        for unit in segments(plan, place):
            if isinstance(unit, int):
                order.append(unit)
            elif plan.settings.saves.by_graph and all(_is_kept(plan, i) for i in unit.nodes):
                order += unit.nodes
            else:
                made = _region(plan, unit.nodes, out_kinds, is_last=unit.is_last, has_names=True)
                order.append(made)
        return order
    found = islands(plan)
    if not found:
        return list(range(len(plan.graph.nodes)))
    # After the last contraction, nothing lies between the forward and the backward pass of an
    # island, so the island needs no barrier there (see `recompute`).
    later = before_calls(plan)
    lone = alone(plan, found, later) if place is Surroundings.WHOLE else None
    unit_of: dict[int, int] = {}
    units: list[int | Region] = []
    members = {index: which for which, island in enumerate(found) for index in island.nodes}
    placed: dict[int, int] = {}
    for index in range(len(plan.graph.nodes)):
        which = members.get(index)
        if which is None:
            unit_of[index] = len(units)
            units.append(index)
        elif which in placed:
            unit_of[index] = placed[which]
        else:
            unit_of[index] = placed[which] = len(units)
            one = found[which]
            is_last = later.isdisjoint((*one.nodes, *one.copied))
            how: Any = {"copied": one.copied, "is_last": is_last, "is_alone": one == lone}
            units.append(_region(plan, one.nodes, out_kinds, **how))
    return _sorted(plan, units, unit_of)


def _is_kept(plan: Plan, index: int) -> bool:
    """Return whether the results of an operation are stored as they are."""
    decision = plan.decisions[index]
    is_plain = decision.store is not None and decision.store.is_plain
    return is_plain or all(kind.is_weight for kind in decision.outs)


def _sorted(plan: Plan, units: list[int | Region], unit_of: dict[int, int]) -> list[int | Region]:
    needs: list[set[int]] = [set() for _ in units]
    for index, node in enumerate(plan.graph.nodes):
        for operand in node.ins:
            made_by = plan.maker(operand)
            if made_by is not None and unit_of[made_by] != unit_of[index]:
                needs[unit_of[index]].add(unit_of[made_by])
    effects = [index for index, node in enumerate(plan.graph.nodes) if node.effects]
    for before, index in itertools.pairwise(effects):
        needs[unit_of[index]].add(unit_of[before])
    users: dict[int, list[int]] = defaultdict(list)
    for unit, others in enumerate(needs):
        for other in others:
            users[other].append(unit)
    # Take the first unit, in the user's order, that can run. The values that are live at the same
    # time then stay close to those of the user's program, from which XLA's own scheduler starts.
    waiting = [len(others) for others in needs]
    ready = [unit for unit, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order: list[int | Region] = []
    while ready:
        unit = heapq.heappop(ready)
        order.append(units[unit])
        for user in users[unit]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, user)
    return order


def _region(
    plan: Plan,
    nodes: Sequence[int],
    out_kinds: Sequence[Kind],
    *,
    is_last: bool,
    copied: Collection[int] = (),
    has_names: bool = False,
    is_alone: bool = False,
) -> Region:
    graph, compute = plan.graph, plan.settings.compute
    made = {number for index in nodes for number in graph.nodes[index].outs}
    nodes = tuple(sorted({*nodes, *copied}))
    inside = set(nodes)
    reads: dict[int, np.dtype | None] = {}
    for index in nodes:
        for operand in graph.nodes[index].ins:
            if not isinstance(operand, Constant) and plan.maker(operand) not in inside:
                kind = plan.seen(operand, index)
                if kind is Kind.WIDE and plan.decisions[index].rule is Rule.COMPUTE:
                    # The factors of products are rounded before they are stored.
                    kind = Kind.LOW
                dtype = held_dtype(graph.avals[operand], kind, compute)
                # State is read in float32, also if other operations read it rounded.
                reads[operand] = FLOAT32 if FLOAT32 in (dtype, reads.get(operand)) else dtype
    outputs = _outputs(plan, made, inside, out_kinds)
    return Region(nodes, tuple(reads.items()), outputs, is_last, has_names, is_alone)


def _outputs(
    plan: Plan, made: set[int], inside: set[int], out_kinds: Sequence[Kind]
) -> tuple[tuple[int, np.dtype | None], ...]:
    """Return the values that go out of operations that run together, each with its dtype.

    Args:
        plan: The plan.
        made: The values that may go out.
        inside: The operations.
        out_kinds: The kinds in which the function's results are wanted.
    """
    graph = plan.graph
    outputs: dict[tuple[int, np.dtype | None], None] = {}
    # A value that one reader wants low and another one wide goes out twice. Both copies are cast
    # inside, so that the cotangent of the narrow one comes back narrow.
    for number in sorted(made):
        for index in sorted(graph.users[number] - inside):
            outputs[number, _taken(plan, number, index)] = None
    for operand, kind in zip(graph.outputs, out_kinds, strict=True):
        if not isinstance(operand, Constant) and operand in made:
            dtype = held_dtype(graph.avals[operand], kind, plan.settings.compute)
            outputs[operand, dtype] = None
    return tuple(outputs)


def _taken(plan: Plan, number: int, index: int) -> np.dtype | None:
    """Return the dtype in which an operation wants a value that comes out of a region."""
    decision, compute = plan.decisions[index], plan.settings.compute
    kind = plan.seen(number, index)
    if decision.rule is Rule.COMPUTE:
        # The value is rounded before it leaves, so that its cotangent comes back narrow, too.
        kind = Kind.LOW
    return held_dtype(plan.graph.avals[number], kind, compute)


def factors_of(plan: Plan, region: Region) -> set[int]:
    """Return the positions of a region's inputs that products in it read."""
    nodes = [plan.graph.nodes[index] for index in region.nodes]
    operands = (x for node in nodes if node.name in CONTRACTIONS for x in node.ins)
    read = {operand for operand in operands if not isinstance(operand, Constant)}
    return {position for position, number in enumerate(region.inputs) if number in read}
