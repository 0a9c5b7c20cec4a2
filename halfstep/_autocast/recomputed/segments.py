"""Segments: what lies between loops, branches, calls and effects, where rules say what is stored.

A segment runs in a `jax.checkpoint` that saves nothing but its stores (see `stores`). It takes the
place of islands, and unlike those it holds contractions: which of their results are stored is what
the rules are about, and all else is recomputed from these.

Loops, branches and calls are not part of a segment: they would run twice. Their bodies have
segments of their own. Neither is anything with an effect, which must happen once.

What lies between two values that are stored is a segment of its own. A `jax.checkpoint` recomputes
all of its inside at once, before the first gradient of it is computed: for layers that are written
out one after the other, that would be the memory of all of them. Where all that goes from one part
to the next is stored anyway, two of them cost no more than one. In the body of a loop, whose
iterations are recomputed one by one, the parts stay together.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from jax.ref import AbstractRef

from halfstep._autocast.kinds import Kind
from halfstep._autocast.plans import Plan, held_dtype, seen_kind
from halfstep._autocast.recomputed.islands import outputs_of
from halfstep._autocast.recomputed.recompute import Surroundings
from halfstep._program import Constant, CustomJvp, size

# What goes on without being stored is at most this part of what is.
_SMALL = 8


@dataclasses.dataclass(frozen=True)
class Segment:
    """Operations that are run, and recomputed, together."""

    nodes: tuple[int, ...]
    reads: tuple[tuple[int, np.dtype | None], ...]
    """What comes in, and the dtype it is read in; `None` as it is held."""
    outputs: tuple[tuple[int, np.dtype | None], ...]
    """What goes out, and the dtype it is held in; a value may go out in both."""
    is_last: bool
    """Whether nothing that is dear to recompute is in it, or comes after it."""


def segments(plan: Plan, out_kinds: Sequence[Kind], place: Surroundings) -> list[int | Segment]:
    """Operations and segments in an order in which they can run.

    Args:
        plan: What is run.
        out_kinds: As which kinds its outputs are wanted.
        place: Where it runs.
    """
    apart = [is_apart(plan, index) for index in range(len(plan.graph.nodes))]
    levels = _levels(plan, apart)
    # Between the forward and the backward pass of what comes after the last contraction, such as a
    # loss, nothing lies: it needs no barrier, and is a segment of its own. Of a loop's body or a
    # call, the backward pass comes later, and what such a segment reads would be kept for it.
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
            is_last = level == after
            in_loop = place is Surroundings.LOOP
            parts = [together[level]] if in_loop else _parts(plan, together[level])
            order += [_segment(plan, part, out_kinds, is_last=is_last) for part in parts]
        order += alone[level]
    return order


def is_apart(plan: Plan, index: int) -> bool:
    """Whether an operation is in no segment: a loop, a branch, a call, or one with an effect."""
    node, decision = plan.graph.nodes[index], plan.decisions[index]
    holds = decision.inner is not None and not isinstance(node.structure, CustomJvp)
    # Making a `Ref` is not an effect, and it must not be made twice either.
    avals = map(plan.graph.aval, (*node.ins, *node.outs))
    return node.effects or holds or any(isinstance(aval, AbstractRef) for aval in avals)


def _last(plan: Plan, apart: Sequence[bool]) -> set[int]:
    """The operations after which nothing comes that is dear or stands apart, and are neither."""
    graph = plan.graph
    leads: set[int] = set()
    for index in reversed(range(len(graph.nodes))):
        users = (user for number in graph.nodes[index].outs for user in graph.users[number])
        if apart[index] or plan.decisions[index].barrier or any(user in leads for user in users):
            leads.add(index)
    return set(range(len(graph.nodes))) - leads


def _levels(plan: Plan, apart: Sequence[bool]) -> list[int]:
    """Of each operation, how many of those that stand apart come before it.

    As many as possible for all that is not apart: what only the last segment reads is made there,
    and need not be handed to it. Along every edge of the graph levels do not fall, so that the
    operations of one level can run together.
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
    """Operations of one level, parted where all that goes on is stored.

    Of all such places between two dear operations, it is the one where the least goes on. What goes
    on without being stored must be small: it is kept as what comes into the next part.
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
        # Of several the last: what comes after it is read as it was stored.
        cuts += sorted(fitting, key=lambda x: (stored[x] + loose[x], -x))[:1]
    return [list(nodes[begin:end]) for begin, end in itertools.pairwise((*cuts, len(nodes)))]


def _is_stored(plan: Plan, number: int) -> bool:
    maker = plan.maker(number)
    return maker is not None and plan.decisions[maker].store is not None


def crossing(plan: Plan, nodes: Sequence[int]) -> list[set[int]]:
    """Before each of some operations, the values that earlier ones hand to it or to later ones.

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
    """The bytes of values that are kept, in the dtypes in which they are read later."""
    return sum(_held_bytes(plan, number) for number in numbers)


def _held_bytes(plan: Plan, number: int) -> int:
    aval = plan.graph.avals[number]
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    held = held_dtype(aval, seen_kind(plan, number, len(plan.levels)), plan.settings.compute)
    return size(aval) * (dtype if held is None else held).itemsize


def _segment(
    plan: Plan, nodes: Sequence[int], out_kinds: Sequence[Kind], *, is_last: bool
) -> Segment:
    graph, compute = plan.graph, plan.settings.compute
    made = {number for index in nodes for number in graph.nodes[index].outs}
    seen: dict[int, set[Kind]] = defaultdict(set)
    for index in nodes:
        for operand in graph.nodes[index].ins:
            if not isinstance(operand, Constant) and operand not in made:
                seen[operand].add(plan.seen(operand, plan.levels[index]))
    # Rounded before it comes in, if no reader wants more: what comes in is kept as it is.
    reads = {
        number: compute if kinds == {Kind.LOW} and plan.kinds[number] is Kind.WIDE else None
        for number, kinds in seen.items()
    }
    outputs = outputs_of(plan, made, set(nodes), out_kinds)
    return Segment(tuple(nodes), tuple(reads.items()), outputs, is_last)
