"""Find islands: float32 regions between contractions that are recomputed instead of stored.

Softmax, norms and losses run in float32. Their residuals would be stored in float32 as well, which
would make autocasting take more memory than casting everything. So adjacent float32 operations are
gathered into islands, whose inputs and outputs are held in the compute dtype, and whose inside is
recomputed in the backward pass. An island never contains an effect, a loop or a call, and of
contractions only those that are cheaper to make again than to store, and their readers: see
`_with_products`. Effects run in the order in which they are written: each counts as an operand of
the next.
"""

import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from halfstep._autocast.default_stores import cheap_products
from halfstep._autocast.kinds import Kind
from halfstep._autocast.plans import FLOAT32, Plan, held_dtype
from halfstep._autocast.primitives import CONTRACTIONS, Rule
from halfstep._program import Constant, Remat, size


@dataclasses.dataclass(frozen=True)
class Island:
    """Operations that are recomputed together."""

    nodes: tuple[int, ...]
    reads: tuple[tuple[int, np.dtype | None], ...]
    """The values that come in, each with the dtype it is held in."""
    outputs: tuple[tuple[int, np.dtype | None], ...]
    """The values that go out, each with the dtype it is held in; a value may go out in both."""
    is_last: bool
    """Whether neither a contraction nor anything that may contain one comes after it."""

    @property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the values that come in."""
        return tuple(number for number, _ in self.reads)


def schedule(plan: Plan, out_kinds: Sequence[Kind]) -> list[int | Island]:
    """Return operations and islands in an order in which they can run."""
    settings = plan.settings
    has_islands = (settings.islands or settings.is_recomputed) and not settings.has_segments
    groups = _groups(plan) if has_islands else []
    if settings.is_recomputed:
        groups = [group for group in groups if is_worth_twice(plan, group)]
    if not groups:
        return list(range(len(plan.graph.nodes)))
    begun = [_begun(plan, group) for group in groups]
    groups = [tuple(sorted({*group, *own})) for group, (own, _) in zip(groups, begun, strict=True)]
    # After the last contraction, nothing lies between the forward and the backward pass of an
    # island, so the island needs no barrier there (see `recompute`).
    later = before_calls(plan)
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


# Functions that XLA:GPU computes once and writes to memory if two kernels read them.
_WRITTEN = frozenset(
    {"erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "tanh"}
)


def is_worth_twice(plan: Plan, group: Sequence[int]) -> bool:
    """Return whether computing a group twice saves memory traffic where nothing is stored.

    In a function that the user recomputes, an activation function and its derivative are next to
    each other. Both read a `tanh`, so XLA:GPU writes it to memory, in float32. Computed twice, it
    is fused with both readers: a step of a GPT with `jax.checkpoint` moves 3 GiB less of 83 on an
    H100. A softmax or a norm would have its reductions computed twice as well, which costs more
    than it saves: 86 GiB with all islands, and 80 with these.
    """
    graph = plan.graph
    nodes = [graph.nodes[index] for index in group]
    is_reduced = any(
        size(graph.aval(operand)) > size(graph.avals[node.outs[0]])
        for node in nodes
        for operand in node.ins
    )
    return not is_reduced and any(node.name in _WRITTEN for node in nodes)


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
    # Take the first unit, in the user's order, that can run. The values that are live at the same
    # time then stay close to those of the user's program, from which XLA's own scheduler starts.
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
    """Return the operations of each island."""
    nodes = plan.graph.nodes
    # Operations of one level have the same number of contractions before them. Two operations of
    # different levels have a contraction between them, or next to them. No island may contain it,
    # because it would be computed twice. So islands are made level by level.
    by_level: dict[int, list[int]] = defaultdict(list)
    for index, level in enumerate(plan.levels):
        by_level[level].append(index)
    groups: list[tuple[int, ...]] = []
    for indices in by_level.values():
        wide = {index for index in indices if is_wide(plan, index)}
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
    return groups if plan.settings.is_recomputed else _with_products(plan, groups)


def _with_products(plan: Plan, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Let groups take in products whose results are cheaper to make again than to store.

    Scores of attention are such results: large, of small factors. A group then has all that lies
    between that product and those which read what is made of it (probabilities), and these, too:
    only the factors are stored. The backward pass does not multiply again for a product at the end
    of a group: nothing in the group reads the result.
    """
    taken: set[int] = set()
    found: list[tuple[int, ...]] = []
    cheap = cheap_products(
        plan.graph, plan.settings.compute, lambda number: plan.kinds[number].is_weight
    )
    for index in sorted(cheap):
        region = _region(plan, index, groups) if _is_plain_product(plan, index) else None
        if region is not None and taken.isdisjoint(region):
            taken |= region
            found.append(tuple(sorted(region)))
    return [group for group in groups if taken.isdisjoint(group)] + found


def _is_plain_product(plan: Plan, index: int) -> bool:
    node, decision = plan.graph.nodes[index], plan.decisions[index]
    own = decision.site, decision.function, decision.inner, decision.store
    return (
        node.name == "dot_general"
        and decision.rule is Rule.COMPUTE
        and all(x is None for x in own)
        and index not in plan.reads
    )


def _region(plan: Plan, first: int, groups: Sequence[tuple[int, ...]]) -> set[int] | None:
    """Return what is made of a product, up to the products that read it, or `None` if not that."""
    graph = plan.graph
    of_group = {index: group for group in groups for index in group}
    region, last = {first}, set[int]()
    waiting = [first]
    while waiting:
        for number in graph.nodes[waiting.pop()].outs:
            if number in graph.returned:
                return None
            for user in graph.users[number]:
                if user in region or user in last:
                    continue
                if plan.decisions[user].barrier:
                    if not _is_plain_product(plan, user):
                        return None
                    last.add(user)
                else:
                    grown = {user, *of_group.get(user, ())}
                    waiting += grown - region
                    region |= grown
    region |= last
    if not last:
        return None
    # Between the first level and the last, a path that leaves the region must not come back.
    span = range(min(region), max(region) + 1)
    before = {
        index: [m for m in map(plan.maker, graph.nodes[index].ins) if m is not None and m in span]
        for index in span
    }
    outside = {maker for index in region for maker in before[index]} - region
    return region if region.isdisjoint(_reached(list(outside), before)) else None


def factors_of(plan: Plan, island: Island) -> set[int]:
    """Return the positions of an island's inputs that products in it read."""
    nodes = [plan.graph.nodes[index] for index in island.nodes]
    operands = (x for node in nodes if node.name in CONTRACTIONS for x in node.ins)
    read = {operand for operand in operands if not isinstance(operand, Constant)}
    return {position for position, number in enumerate(island.inputs) if number in read}


def is_wide(plan: Plan, index: int) -> bool:
    """Return whether an operation makes float32 of low values, which is worth recomputing."""
    decision = plan.decisions[index]
    if decision.barrier or Kind.WIDE not in decision.outs:
        return False
    # Before the first contraction, float32 that was made of float32 (such as a normalized batch)
    # stays as it is: rounding its inputs would lose digits that never had to fit into 16 bits.
    operands = plan.graph.nodes[index].ins
    return plan.depths[index] > 0 or any(_depends_on_low(plan, operand) for operand in operands)


def _depends_on_low(plan: Plan, operand: int | Constant) -> bool:
    return not isinstance(operand, Constant) and (
        plan.kinds[operand].is_low or operand in plan.rounded or operand in plan.too_large
    )


def _closed(
    plan: Plan, indices: list[int], wide: set[int], merged: "_Union"
) -> list[tuple[int, ...]]:
    """Add everything that lies between the members of a group, until no group grows."""
    # An island runs as one function, so it must be convex. If `a` and `c` are in it, and `c` needs
    # `b`, which needs `a`, then neither "the island, then b" nor "b, then the island" is a valid
    # order. So every operation on a path from member to member is added, whatever its dtype. An
    # added operation can belong to another island, which then joins, and there may be new paths
    # through the union: hence the loop, which ends because groups only grow.
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
    """A union-find structure: which of some numbers belong together."""

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
    """Find the cheap operations that an island begins with, in addition to its float32.

    A row that is broadcast to a matrix is broadcast again, instead of being stored as a matrix.

    Returns:
        The operations that only the island uses, and those that are copied into it.
    """
    graph, chosen = plan.graph, set(group)
    # With products in it, an island reads values of several levels, such as a mask.
    spans = any(plan.decisions[index].barrier for index in group)
    found: set[int] = set()
    waiting = list(group)
    while waiting:
        for operand in graph.nodes[waiting.pop()].ins:
            index = plan.maker(operand)
            if index is None or index in chosen or index in found:
                continue
            near = spans or plan.levels[index] == plan.levels[group[0]]
            if near and _is_cheap(plan, index, masks=spans):
                found.add(index)
                waiting.append(index)
    # A broadcast that other operations read as well is not moved into the island but copied. It
    # costs nothing there, and storing it as a matrix would cost what the island is meant to save.
    own = set(found)
    while True:
        inside = chosen | own
        alone = {index for index in own if _is_used_only_in(plan, index, inside)}
        if alone == own:
            return own, found - own
        own = alone


def before_calls(plan: Plan) -> set[int]:
    """Return the operations before a contraction, or before anything that may contain one."""
    found: set[int] = set()
    for index in reversed(range(len(plan.graph.nodes))):
        users = (
            user for number in plan.graph.nodes[index].outs for user in plan.graph.users[number]
        )
        if any(user in found or _may_contract(plan, user) for user in users):
            found.add(index)
    return found


def _may_contract(plan: Plan, index: int) -> bool:
    # The name decides: a contraction that the user has asked to run in float32 counts, too.
    decision, name = plan.decisions[index], plan.graph.nodes[index].name
    if isinstance(plan.graph.nodes[index].structure, Remat) and isinstance(decision.inner, Plan):
        inner = decision.inner
        return any(_may_contract(inner, number) for number in range(len(inner.graph.nodes)))
    return decision.barrier and (name in CONTRACTIONS or decision.inner is not None)


def _is_cheap(plan: Plan, index: int, *, masks: bool) -> bool:
    """Return whether an operation is a broadcast in the compute dtype, which need not be stored.

    With `masks`, also one of integers, or of a number of the program.
    """
    node, decision = plan.graph.nodes[index], plan.decisions[index]
    kinds = (Kind.LOW, Kind.OTHER, Kind.SOFT) if masks else (Kind.LOW,)
    if decision.barrier or decision.function is not None or decision.outs[0] not in kinds:
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
    graph, compute = plan.graph, plan.settings.compute
    made = {number for index in group for number in graph.nodes[index].outs}
    group = tuple(sorted({*group, *copied}))
    chosen = set(group)
    reads: dict[int, np.dtype | None] = {}
    for index in group:
        for operand in graph.nodes[index].ins:
            if not isinstance(operand, Constant) and plan.maker(operand) not in chosen:
                kind = plan.seen(operand, index)
                if kind is Kind.WIDE and plan.decisions[index].rule is Rule.COMPUTE:
                    # What a product reads is rounded before it is stored.
                    kind = Kind.LOW
                dtype = held_dtype(graph.avals[operand], kind, compute)
                # State is read in float32, also if other operations read it rounded.
                reads[operand] = FLOAT32 if FLOAT32 in (dtype, reads.get(operand)) else dtype
    outputs = outputs_of(plan, made, chosen, out_kinds)
    return Island(group, tuple(reads.items()), outputs, not later.intersection(group))


def outputs_of(
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
            outputs[number, taken(plan, number, index)] = None
    for operand, kind in zip(graph.outputs, out_kinds, strict=True):
        if not isinstance(operand, Constant) and operand in made:
            dtype = held_dtype(graph.avals[operand], kind, plan.settings.compute)
            outputs[operand, dtype] = None
    return tuple(outputs)


def taken(plan: Plan, number: int, index: int) -> np.dtype | None:
    """Return the dtype in which an operation wants a value that comes out of an island."""
    decision, compute = plan.decisions[index], plan.settings.compute
    kind = plan.seen(number, index)
    if decision.rule is Rule.COMPUTE:
        # The value is rounded before it leaves, so that its cotangent comes back narrow, too.
        kind = Kind.LOW
    return held_dtype(plan.graph.avals[number], kind, compute)
