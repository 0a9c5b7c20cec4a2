"""Islands: float32 between contractions, stored in the compute dtype and recomputed.

Softmax, norms and losses run in float32. What the backward pass needs of them would be stored in
float32 as well, which is what makes autocasting take more memory than casting everything. So
adjacent float32 operations are gathered into islands, whose inputs and outputs are held in the
compute dtype, and whose inside is recomputed in the backward pass. Contractions are never inside an
island; neither is anything with an effect, a loop, or a call. Effects run in the order in which
they are written: each counts as an operand of the next.
"""

import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from halfstep._autocast.kinds import Kind
from halfstep._autocast.plans import Plan, held_dtype
from halfstep._autocast.primitives import CONTRACTIONS, Rule
from halfstep._program import Constant, size


@dataclasses.dataclass(frozen=True)
class Island:
    """Operations that are recomputed together."""

    nodes: tuple[int, ...]
    reads: tuple[tuple[int, np.dtype | None], ...]
    """What comes in, and the dtype it is held in."""
    outputs: tuple[tuple[int, np.dtype | None], ...]
    """What goes out, and the dtype it is held in; a value may go out in both."""
    is_last: bool
    """Whether no contraction comes after it, nor anything that may hold one."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of what comes in."""
        return tuple(number for number, _ in self.reads)


def schedule(plan: Plan, out_kinds: Sequence[Kind]) -> list[int | Island]:
    """Operations and islands in an order in which they can run."""
    has_islands = plan.settings.islands and not plan.settings.has_segments
    groups = _groups(plan) if has_islands else []
    if not groups:
        return list(range(len(plan.graph.nodes)))
    begun = [_begun(plan, group) for group in groups]
    groups = [tuple(sorted({*group, *own})) for group, (own, _) in zip(groups, begun, strict=True)]
    # After the last contraction nothing lies between the forward and the backward pass of an
    # island, so there it needs no barrier (see `recompute`).
    later = _before_calls(plan)
    islands = [
        _island(plan, group, out_kinds, copied, later)
        for group, (_, copied) in zip(groups, begun, strict=True)
    ]
    unit_of: dict[int, int] = {}
    units: list[int | Island] = []
    members = {index: which for which, group in enumerate(groups) for index in group}
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
            units.append(islands[which])
    return _sorted(plan, units, unit_of)


def _sorted(plan: Plan, units: list[int | Island], unit_of: dict[int, int]) -> list[int | Island]:
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
    # Of all that can run, the first as it was written: what is live at the same time stays close to
    # what the user's program has, on which XLA's own scheduler begins.
    waiting = [len(others) for others in needs]
    ready = [unit for unit, count in enumerate(waiting) if not count]
    heapq.heapify(ready)
    order: list[int | Island] = []
    while ready:
        unit = heapq.heappop(ready)
        order.append(units[unit])
        for user in users[unit]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, user)
    return order


def _groups(plan: Plan) -> list[tuple[int, ...]]:
    """The operations of each island."""
    nodes = plan.graph.nodes
    # Operations of one level have the same number of contractions before them. Two of different
    # levels have a contraction between them, or beside them, which no island may hold: it would be
    # computed twice. So islands are made level by level.
    by_level: dict[int, list[int]] = defaultdict(list)
    for index, level in enumerate(plan.levels):
        by_level[level].append(index)
    groups: list[tuple[int, ...]] = []
    for indices in by_level.values():
        wide = {index for index in indices if _is_wide(plan, index)}
        if not wide:
            continue
        merged = _Union(indices)
        for index in sorted(wide):
            for operand in nodes[index].ins:
                if isinstance(operand, Constant):
                    continue
                made_by = plan.maker(operand)
                if made_by is not None and made_by in wide and plan.kinds[operand] is Kind.WIDE:
                    merged.join(made_by, index)
        groups += _closed(plan, indices, wide, merged)
    return groups


def _is_wide(plan: Plan, index: int) -> bool:
    """Whether an operation makes float32 of what was low: what it would store is worth its time."""
    decision = plan.decisions[index]
    if decision.barrier or Kind.WIDE not in decision.outs:
        return False
    # Before the first contraction, float32 that was made of float32 (a batch that is normalized,
    # say) stays as it is: to round what comes in would lose what 16 bits did not have to hold.
    level = plan.levels[index]
    return level > 0 or any(
        plan.seen(operand, level) in (Kind.STORED, Kind.LOW, Kind.WIDE)
        and _depends_on_low(plan, operand)
        for operand in plan.graph.nodes[index].ins
    )


def _depends_on_low(plan: Plan, operand: int | Constant) -> bool:
    return not isinstance(operand, Constant) and (
        plan.kinds[operand].is_low or operand in plan.rounded or operand in plan.too_large
    )


def _closed(
    plan: Plan, indices: list[int], wide: set[int], merged: "_Union"
) -> list[tuple[int, ...]]:
    """Groups with everything that lies between their members, until none has to grow."""
    # An island runs as one function, so it must be convex: where `a` and `c` are in it, and `c`
    # needs `b` which needs `a`, neither "the island, then b" nor "b, then the island" is an order.
    # All that lies on a way from a member to a member is taken in, whatever its dtype. What is
    # taken in can be of another island, which then joins, and the union may have new ways through
    # it: hence the loop, which ends since groups only grow.
    inside = set(indices)
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {index: [] for index in indices}
    for index in indices:
        made = set(map(plan.maker, plan.graph.nodes[index].ins))
        before[index] = sorted(other for other in made if other in inside)
        for other in before[index]:
            after[other].append(index)
    members = set(wide)
    while True:
        grown = False
        groups: dict[int, list[int]] = defaultdict(list)
        for index in sorted(members):
            groups[merged.find(index)].append(index)
        for group in list(groups.values()):
            if len(group) < 2:
                continue
            down = _reached(group, after)
            up = _reached(group, before)
            for index in sorted(down & up):
                if index not in members or merged.find(index) != merged.find(group[0]):
                    members.add(index)
                    merged.join(group[0], index)
                    grown = True
        if not grown:
            return [tuple(group) for group in groups.values()]


def _reached(start: list[int], edges: dict[int, list[int]]) -> set[int]:
    found: set[int] = set()
    waiting = list(start)
    while waiting:
        for index in edges[waiting.pop()]:
            if index not in found:
                found.add(index)
                waiting.append(index)
    return found


class _Union:
    """Which of some numbers belong together."""

    def __init__(self, items: list[int]):
        self.parent = {item: item for item in items}

    def find(self, item: int) -> int:
        while self.parent[item] != item:
            self.parent[item] = self.parent[self.parent[item]]
            item = self.parent[item]
        return item

    def join(self, a: int, b: int) -> None:
        self.parent[self.find(b)] = self.find(a)


def _begun(plan: Plan, group: tuple[int, ...]) -> tuple[set[int], set[int]]:
    """With what an island begins beside its float32: what is its alone, and copies of the rest.

    A row that is spread over a matrix is spread again, instead of being stored as a matrix.
    """
    graph, chosen = plan.graph, set(group)
    found: set[int] = set()
    waiting = list(group)
    while waiting:
        for operand in graph.nodes[waiting.pop()].ins:
            index = plan.maker(operand)
            if index is None or index in chosen or index in found:
                continue
            if plan.levels[index] == plan.levels[group[0]] and _is_cheap(plan, index):
                found.add(index)
                waiting.append(index)
    # What others read as well is not moved into the island but copied: a broadcast costs nothing
    # there, and to store it as a matrix would cost what the island is there to save.
    own = set(found)
    while True:
        inside = chosen | own
        alone = {index for index in own if _is_used_only_in(plan, index, inside)}
        if alone == own:
            return own, found - own
        own = alone


def _before_calls(plan: Plan) -> set[int]:
    """The operations after which a contraction comes, or anything that may hold one."""
    found: set[int] = set()
    for index in reversed(range(len(plan.graph.nodes))):
        users = (
            user for number in plan.graph.nodes[index].outs for user in plan.graph.users[number]
        )
        if any(user in found or _may_contract(plan, user) for user in users):
            found.add(index)
    return found


def _may_contract(plan: Plan, index: int) -> bool:
    # By its name: a contraction that the user has asked to run in float32 is one, too.
    decision, name = plan.decisions[index], plan.graph.nodes[index].name
    return decision.barrier and (name in CONTRACTIONS or decision.inner is not None)


def _is_cheap(plan: Plan, index: int) -> bool:
    """Whether an operation in the compute dtype makes what it need not store."""
    node, decision = plan.graph.nodes[index], plan.decisions[index]
    if decision.barrier or decision.function is not None or decision.outs != (Kind.LOW,):
        return False
    whole = size(plan.graph.avals[node.outs[0]])
    is_spread = all(size(plan.graph.aval(operand)) < whole for operand in node.ins)
    return node.name == "broadcast_in_dim" and is_spread


def _is_used_only_in(plan: Plan, index: int, inside: set[int]) -> bool:
    graph = plan.graph
    return all(
        graph.users[number] <= inside and number not in graph.returned
        for number in graph.nodes[index].outs
    )


def _island(
    plan: Plan,
    group: tuple[int, ...],
    out_kinds: Sequence[Kind],
    copied: set[int],
    later: set[int],
) -> Island:
    graph, level, compute = plan.graph, plan.levels[group[0]], plan.settings.compute
    made = {number for index in group for number in graph.nodes[index].outs}
    group = tuple(sorted({*group, *copied}))
    chosen = set(group)
    reads: dict[int, np.dtype | None] = {}
    for index in group:
        for operand in graph.nodes[index].ins:
            if not isinstance(operand, Constant) and plan.maker(operand) not in chosen:
                reads[operand] = held_dtype(
                    graph.avals[operand], plan.seen(operand, level), compute
                )
    outputs = outputs_of(plan, made, chosen, out_kinds)
    return Island(group, tuple(reads.items()), outputs, not later.intersection(group))


def outputs_of(
    plan: Plan, made: set[int], inside: set[int], out_kinds: Sequence[Kind]
) -> tuple[tuple[int, np.dtype | None], ...]:
    """What goes out of operations that run together, and the dtype it is held in.

    Args:
        plan: The plan.
        made: The values that may go out.
        inside: The operations.
        out_kinds: What the function is asked to return.
    """
    graph = plan.graph
    outputs: dict[tuple[int, np.dtype | None], None] = {}
    # A value that one reader wants low and another one wide goes out twice. Both are cast inside,
    # so that the cotangent of the narrow one comes back narrow.
    for number in sorted(made):
        for index in sorted(graph.users[number] - inside):
            outputs[number, taken(plan, number, index)] = None
    for operand, kind in zip(graph.outputs, out_kinds, strict=True):
        if not isinstance(operand, Constant) and operand in made:
            dtype = held_dtype(graph.avals[operand], kind, plan.settings.compute)
            outputs[operand, dtype] = None
    return tuple(outputs)


def taken(plan: Plan, number: int, index: int) -> np.dtype | None:
    """The dtype in which an operation wants a value that comes out of an island."""
    decision, compute = plan.decisions[index], plan.settings.compute
    kind = plan.seen(number, plan.levels[index])
    if decision.rule is Rule.COMPUTE:
        # Rounded before it leaves, so that what comes back in the backward pass is narrow too.
        kind = Kind.LOW
    return held_dtype(plan.graph.avals[number], kind, compute)
