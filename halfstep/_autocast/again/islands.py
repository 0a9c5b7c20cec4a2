"""Find islands: the operations between contractions that are made again together.

Softmax, norms and losses run in float32. Their residuals would be stored in float32 as well, which
would make autocasting take more memory than casting everything. So adjacent float32 operations are
gathered into islands, whose inputs and outputs are held in the compute dtype, and whose inside is
recomputed in the backward pass. An island never contains an effect, a loop or a call, and of
contractions only those that are cheaper to make again than to store, and their readers: see
`_with_products`. The user's rules say of single operations that they are stored, or not.
"""

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from halfstep._autocast.choice import cheap_products
from halfstep._autocast.kinds import Kind
from halfstep._autocast.plans import Plan
from halfstep._autocast.primitives import CONTRACTIONS, PASSING, Rule
from halfstep._autocast.stored.saves import Again
from halfstep._program import Constant, Remat, size

# The result of a head has so many times the numbers of what it is made of.
_HEAD = 8
# A group is alone if its largest value has so many times the numbers of any other group's.
_ALONE = 2


class Island(NamedTuple):
    """Operations that are made again together."""

    nodes: tuple[int, ...]
    copied: frozenset[int]
    """Cheap operations that it repeats, because others read their results as well."""


def islands(plan: Plan) -> list[Island]:
    """Return the islands of a plan."""
    again = plan.settings.saves.again
    if again is Again.NOTHING:
        return []
    groups = _groups(plan)
    if again is Again.TWICE:
        groups = [group for group in groups if _is_worth_twice(plan, group)]
    else:
        groups = _with_products(plan, groups)
    made: list[Island] = []
    for group in groups:
        own, copied = _begun(plan, group)
        made.append(Island(tuple(sorted({*group, *own})), frozenset(copied)))
    return made


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
        wide = {i for i in indices if is_wide(plan, i) and plan.decisions[i].store is None}
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


def _with_products(plan: Plan, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Let groups take in results that are not stored, whoever reads them.

    Scores of attention are such results, because they are cheaper to make again than to store:
    large, of small factors. A rule can say so of others. A group then has all that lies between
    such a result and the products which read what is made of it (probabilities), and these, too:
    only the factors are stored. The backward pass does not multiply again for a product at the end
    of a group: nothing in the group reads the result.
    """
    ruled = {
        index
        for index, decision in enumerate(plan.decisions)
        if decision.stored_by and decision.store is None and _may_be_inside(plan, index)
    }
    cheap = cheap_products(
        plan.graph, plan.settings.compute, lambda number: plan.kinds[number].is_weight
    )
    found: list[set[int]] = []
    plain = (index for index in cheap - ruled if _is_plain_product(plan, index))
    # Those of rules come last, and join the others: without these, a path may lead out and back.
    for index in (*sorted(plain), *sorted(ruled)):
        region = _region(plan, index, groups, ruled)
        met = [other for other in found if region is not None and not region.isdisjoint(other)]
        if region is None or (met and index not in ruled):
            continue
        whole = region.union(*met)
        if _is_convex(plan, whole):
            found = [*(other for other in found if other not in met), whole]
    taken = set[int]().union(*found)
    return [group for group in groups if taken.isdisjoint(group)] + [
        tuple(sorted(region)) for region in found
    ]


def alone(plan: Plan, found: Sequence[Island], later: set[int]) -> Island | None:
    """Return the island with products that is far larger than all others, if there is one.

    To make it again saves no memory: its values are alive at once then, just as if they had been
    stored, and nothing else that the backward pass makes is as large. So XLA may merge the two
    computations of a function with one layer of attention, and store what it finds best. After the
    last contraction it always may.

    Args:
        plan: The plan of a whole function, and not of the body of a loop or a call.
        found: Its islands.
        later: What comes before a contraction, from `before_calls`.
    """
    if plan.settings.saves.again is not Again.WIDE:
        return None
    sizes = {
        one: max(size(plan.graph.avals[n]) for i in one.nodes for n in plan.graph.nodes[i].outs)
        for one in found
        if not later.isdisjoint(one.nodes)
    }
    if not sizes:
        return None
    largest = max(sizes, key=sizes.__getitem__)
    decisions = [plan.decisions[index] for index in largest.nodes]
    has_product = any(decision.barrier for decision in decisions)
    is_ruled = any(decision.stored_by for decision in decisions)
    others = (count for one, count in sizes.items() if one != largest)
    is_far = all(sizes[largest] >= _ALONE * count for count in others)
    return largest if has_product and is_far and not is_ruled else None


def joined(plan: Plan) -> frozenset[int]:
    """Return products with weights whose two gradients leave them together.

    XLA computes the gradients of some weights last, and the cotangents that these read live as long
    as that. One is that of a model's logits, which is far larger than what they are made of. Others
    are those of layers whose weights are slices of stacked parameters: the optimizer takes no slice
    before it has all. See `recompute.together`.
    """
    return frozenset(index for index in range(len(plan.graph.nodes)) if _is_joined(plan, index))


def _is_joined(plan: Plan, index: int) -> bool:
    graph, node = plan.graph, plan.graph.nodes[index]
    is_own = plan.settings.saves.again is Again.WIDE and node.name == "dot_general"
    if not is_own or not _is_plain_product(plan, index):
        return False
    factors = [operand for operand in node.ins if not isinstance(operand, Constant)]
    weights = [factor for factor in factors if plan.kinds[factor].is_weight]
    if len(factors) != 2 or len(weights) != 1:
        return False
    (made,) = (factor for factor in factors if factor not in weights)
    result, of_made, of_weight = (size(graph.avals[n]) for n in (node.outs[0], made, *weights))
    is_slice = result > of_weight and _is_slice(plan, weights[0])
    return result >= _HEAD * of_made or is_slice


def _is_slice(plan: Plan, number: int) -> bool:
    """Return whether a weight is a slice of a parameter, moved or cast."""
    maker = plan.maker(number)
    if maker is None:
        return False
    node = plan.graph.nodes[maker]
    if node.name in ("slice", "dynamic_slice"):
        return True
    inputs = [operand for operand in node.ins if not isinstance(operand, Constant)]
    return node.name in PASSING and len(inputs) == 1 and _is_slice(plan, inputs[0])


def _may_be_inside(plan: Plan, index: int) -> bool:
    """Return whether an operation can be in an island, and no rule stores its results."""
    decision = plan.decisions[index]
    is_light = not decision.barrier and decision.store is None
    return is_light or _is_plain_product(plan, index)


def _is_plain_product(plan: Plan, index: int) -> bool:
    node, decision = plan.graph.nodes[index], plan.decisions[index]
    own = decision.site, decision.function, decision.inner, decision.store
    return (
        node.name in CONTRACTIONS
        and decision.rule is Rule.COMPUTE
        and all(x is None for x in own)
        and index not in plan.reads
    )


def _region(
    plan: Plan, first: int, groups: Sequence[tuple[int, ...]], ruled: Collection[int]
) -> set[int] | None:
    """Return what is made of a result, up to the products that read it, or `None` if not that.

    By a rule, a result is not stored even if something that cannot be in an island reads it.
    """
    graph, is_ruled = plan.graph, first in ruled
    of_group = {index: group for group in groups for index in group}
    region, last = {first, *of_group.get(first, ())}, set[int]()
    waiting = list(region)
    while waiting:
        for number in graph.nodes[waiting.pop()].outs:
            if number in graph.returned and not is_ruled:
                return None
            for user in graph.users[number]:
                if user in region or user in last:
                    continue
                if not _may_be_inside(plan, user):
                    if not is_ruled:
                        return None
                elif plan.decisions[user].barrier and user not in ruled:
                    last.add(user)
                else:
                    grown = {user, *of_group.get(user, ())} - last
                    waiting += grown - region
                    region |= grown
    return region | last if last or is_ruled else None


def _is_convex(plan: Plan, region: set[int]) -> bool:
    """Return whether no path leaves some operations and comes back."""
    span = range(min(region), max(region) + 1)
    before = {
        index: [
            maker
            for maker in map(plan.maker, plan.graph.nodes[index].ins)
            if maker is not None and maker in span
        ]
        for index in span
    }
    outside = {maker for index in region for maker in before[index]} - region
    return region.isdisjoint(_reached(list(outside), before))


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


# Functions that XLA:GPU computes once and writes to memory if two kernels read them.
_WRITTEN = frozenset(
    {"erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "log", "log1p", "logistic", "pow", "tanh"}
)


def _is_worth_twice(plan: Plan, group: Sequence[int]) -> bool:
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
