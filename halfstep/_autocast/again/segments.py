"""Find segments: what is made again together where only results of products are stored.

A segment is what lies between loops, branches, calls and effects. It runs in a `jax.checkpoint`
that saves nothing but its stores (see `names`). Unlike islands, segments contain contractions,
whose results are stored, and everything else is recomputed from the stores.

Loops, branches and calls are not part of a segment, because they would run twice. Their bodies have
segments of their own. An operation with an effect is not part of a segment either, because an
effect must happen once.

The operations between two stored values are a segment of their own. A `jax.checkpoint` recomputes
all of its inside at once, before it computes its first gradient. For unrolled layers in one
segment, that would take the memory of all of them. If everything that goes from one part to the
next is stored anyway, two segments cost no more than one. In the body of a loop, whose iterations
are recomputed one by one, the parts stay together.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax.ref import AbstractRef

from halfstep._autocast.again.surroundings import Surroundings
from halfstep._autocast.plans import Plan, held_dtype
from halfstep._program import CustomJvp, size

# The bytes that cross a cut in stores are at least this many times the bytes of other values.
_SMALL = 8


class Segment(NamedTuple):
    """Operations that are made again together."""

    nodes: list[int]
    is_last: bool
    """Whether nothing that is expensive to recompute is in it, or comes after it."""


def segments(plan: Plan, place: Surroundings) -> list[int | Segment]:
    """Return operations and segments in an order in which they can run.

    Args:
        plan: The plan to run.
        place: Where it runs.
    """
    apart = [is_apart(plan, index) for index in range(len(plan.graph.nodes))]
    levels = _levels(plan, apart)
    # The operations after the last contraction, such as a loss, are a segment of their own. Nothing
    # lies between its forward and its backward pass, so it needs no barrier. The backward pass of a
    # loop's body or of a call comes later, and the inputs of such a segment would be kept for it.
    last = _last(plan, apart) if place is Surroundings.WHOLE else set[int]()
    after = 1 + max(levels, default=0)
    levels = [after if index in last else level for index, level in enumerate(levels)]
    together: dict[int, list[int]] = defaultdict(list)
    alone: dict[int, list[int]] = defaultdict(list)
    for index, level in enumerate(levels):
        (alone if apart[index] else together)[level].append(index)
    order: list[int | Segment] = []
    for level in sorted({*together, *alone}):
        if level in together:
            in_loop = place is Surroundings.LOOP
            parts = [together[level]] if in_loop else _parts(plan, together[level])
            order += [Segment(part, level == after) for part in parts]
        order += alone[level]
    return order


def is_apart(plan: Plan, index: int) -> bool:
    """Return whether an operation is in no segment: a loop, a branch, a call, or an effect."""
    node, decision = plan.graph.nodes[index], plan.decisions[index]
    holds = decision.inner is not None and not isinstance(node.structure, CustomJvp)
    # Making a `Ref` is not an effect, but a `Ref` must not be made twice either.
    avals = map(plan.graph.aval, (*node.ins, *node.outs))
    return node.effects or holds or any(isinstance(aval, AbstractRef) for aval in avals)


def _last(plan: Plan, apart: Sequence[bool]) -> set[int]:
    """Return the operations that are not expensive or apart, and do not lead to such ones."""
    graph = plan.graph
    leads: set[int] = set()
    for index in reversed(range(len(graph.nodes))):
        users = (user for number in graph.nodes[index].outs for user in graph.users[number])
        if apart[index] or plan.decisions[index].barrier or any(user in leads for user in users):
            leads.add(index)
    return set(range(len(graph.nodes))) - leads


def _levels(plan: Plan, apart: Sequence[bool]) -> list[int]:
    """Return how many operations that stand apart come before each operation.

    Operations that do not stand apart get the highest possible level: a value that only the last
    segment reads is made there, and need not be handed to it. Levels never fall along an edge of
    the graph, so that the operations of one level can run together.
    """
    graph = plan.graph
    levels: list[int] = []
    effects = 0
    for node in graph.nodes:
        makers = [maker for operand in node.ins if (maker := graph.maker(operand)) is not None]
        level = max((levels[maker] + apart[maker] for maker in makers), default=0)
        if node.effects:
            # Effects keep their order; those of one level run as they are written.
            level = effects = max(level, effects)
        levels.append(level)
    for index in reversed(range(len(graph.nodes))):
        outs = graph.nodes[index].outs
        users = [user for number in outs for user in graph.users[number]]
        if not apart[index] and users and graph.returned.isdisjoint(outs):
            levels[index] = min(levels[user] for user in users)
    return levels


def _parts(plan: Plan, nodes: Sequence[int]) -> list[list[int]]:
    """Split the operations of one level where everything that crosses the cut is stored.

    Between two expensive operations, the cut is where the fewest bytes cross it. Values that cross
    the cut without being stored must be small, because they are kept as inputs of the next part.
    """
    stored, loose = [], []
    for numbers in crossing(plan, nodes):
        kept = {number for number in numbers if _is_stored(plan, number)}
        stored.append(held_bytes(plan, kept))
        loose.append(held_bytes(plan, numbers - kept))
    dear = [place for place, index in enumerate(nodes) if plan.decisions[index].barrier]
    cuts = [0]
    for before, place in itertools.pairwise(dear):
        fitting = [
            x
            for x in range(before + 1, place + 1)
            if stored[x] > 0 and _SMALL * loose[x] <= stored[x]
        ]
        # Take the last of several equal cuts: operations after it read values as stored.
        cuts += sorted(fitting, key=lambda x: (stored[x] + loose[x], -x))[:1]
    return [list(nodes[begin:end]) for begin, end in itertools.pairwise((*cuts, len(nodes)))]


def _is_stored(plan: Plan, number: int) -> bool:
    maker = plan.maker(number)
    return maker is not None and plan.decisions[maker].store is not None


def crossing(plan: Plan, nodes: Sequence[int]) -> list[set[int]]:
    """Return, for each operation, the values that earlier ones hand to it or to later ones.

    Parameters, and results that are needed outside these operations, are kept in any case and do
    not count.
    """
    graph = plan.graph
    place = {index: position for position, index in enumerate(nodes)}
    last: dict[int, int] = {}
    found: list[set[int]] = []
    for position, index in enumerate(nodes):
        last = {number: end for number, end in last.items() if end >= position}
        found.append(set(last))
        for number, kind in zip(graph.nodes[index].outs, plan.decisions[index].outs, strict=True):
            users = graph.users[number]
            outside = number in graph.returned or any(user not in place for user in users)
            if users and not outside and not kind.is_weight:
                last[number] = max(place[user] for user in users)
    return found


def held_bytes(plan: Plan, numbers: Iterable[int]) -> int:
    """Return the bytes of values that are kept, in the dtypes in which they are read later."""
    return sum(_held_bytes(plan, number) for number in numbers)


def _held_bytes(plan: Plan, number: int) -> int:
    aval = plan.graph.avals[number]
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    held = held_dtype(aval, plan.out_kind(number), plan.settings.compute)
    return size(aval) * (dtype if held is None else held).itemsize
