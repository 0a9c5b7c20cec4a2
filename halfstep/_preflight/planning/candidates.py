"""Read from a traced program which values could be stored, and what recomputing them takes.

Every operation of a function that `autocast` rewrites becomes an operation of the problem that
`selection` solves. Some values are available without being stored: values that enter the function,
the loop's body or the call that the operation is in, values that a loop or call makes, and values
that are made from parameters alone. JAX keeps all of these in any case.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from halfstep._autocast import (
    Again,
    Plan,
    Region,
    Surroundings,
    crossing,
    held_bytes,
    held_dtype,
    inner_plans,
    is_apart,
    lines_of,
    operation_of,
    out_kinds,
    schedule,
)
from halfstep._explain import operation_flops
from halfstep._policy import Operation, StoreRule
from halfstep._preflight.target.accelerators import Accelerator
from halfstep._program import Constant, Finder, Graph, Node, bind_again

# A cut is worth the bytes that it keeps if the backward pass of the part before it needs this many
# times as much: see `_anchors`.
_WORTH = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """An operation of a traced program, in the plan of the function that it is in."""

    plan: Plan
    index: int
    times: int
    operation: Operation
    lines: tuple[str, ...]
    seconds: float
    flops: float
    is_dear: bool
    """Whether it is expensive to recompute: a contraction, a kernel, a communication."""
    is_anchor: bool
    """Whether it is stored so that the parts before and after it are recomputed separately."""
    is_fixed: bool = False
    """Whether one of the user's rules has decided about it."""

    @property
    def node(self) -> Node:
        """The operation as it was traced."""
        return self.plan.graph.nodes[self.index]

    @property
    def bytes(self) -> int:
        """The bytes of its results, kept in the dtypes in which they are read."""
        return self.times * held_bytes(self.plan, self.node.outs)

    def aval(self, number: int) -> Any:
        """Return the type of one of its results, as it is kept."""
        aval = self.plan.graph.avals[number]
        kind = self.plan.out_kind(number)
        dtype = held_dtype(aval, kind, self.plan.settings.compute)
        return aval if dtype is None else aval.update(dtype=dtype)


EVERYTHING = StoreRule("recompute", op="*")
"""A policy with this as its last rule leaves open every choice that its other rules leave open."""
Key = tuple[int, int]
"""A value: its plan, and its number there."""


@dataclasses.dataclass(frozen=True)
class Tape:
    """All operations that could be recomputed.

    Attributes:
        places: The operations, in an order in which they can run.
        needed: The values that the backward pass reads and that are not available anyway.
        takes: For each operation, the operands that are not available anyway.
    """

    places: tuple[Place, ...]
    needed: frozenset[Key]
    takes: tuple[tuple[Key, ...], ...]

    def makes(self, position: int) -> tuple[Key, ...]:
        """Return the values that an operation makes."""
        place = self.places[position]
        return tuple((id(place.plan), number) for number in place.node.outs)


def tape(plans: Sequence[Plan], accelerator: Accelerator) -> Tape:
    """Read from plans which values could be stored.

    Args:
        plans: The plans of the calls of a step, with `EVERYTHING` as the last store rule.
        accelerator: The accelerator, which decides how long operations take.
    """
    finder = Finder()
    needs = functools.cache(_Needs)
    places: list[Place] = []
    takes: list[tuple[Key, ...]] = []
    needed: set[Key] = set()
    for plan, nodes, times, in_loop in _parts(plans):
        made = {number for index in nodes for number in plan.graph.nodes[index].outs}
        made -= {number for number in made if plan.kinds[number].is_weight}
        # The user's rules come first: the values that they store are available.
        fixed = {index for index in nodes if _is_fixed(plan, index)}
        made -= {
            number
            for index in fixed
            if plan.decisions[index].store is not None
            for number in plan.graph.nodes[index].outs
        }
        reads = [needs(_key_of(plan.graph, index)) for index in nodes]
        wanted = [
            read.values(plan.graph.nodes[index]) & made
            for read, index in zip(reads, nodes, strict=True)
        ]
        anchors = set() if in_loop else _anchors(plan, nodes, wanted)
        for index, wants in zip(nodes, wanted, strict=True):
            node = plan.graph.nodes[index]
            if made.isdisjoint(node.outs):
                continue
            needed |= {(id(plan), number) for number in wants}
            own = [x for x in node.ins if not isinstance(x, Constant) and x in made]
            takes.append(tuple((id(plan), number) for number in dict.fromkeys(own)))
            seconds, count = _cost(plan, index, accelerator)
            places.append(
                Place(
                    plan,
                    index,
                    times,
                    operation_of(node, plan.graph),
                    lines_of(node, finder),
                    times * seconds,
                    times * count,
                    plan.decisions[index].barrier,
                    index in anchors,
                    index in fixed,
                )
            )
    return Tape(tuple(places), frozenset(needed), tuple(takes))


def _is_fixed(plan: Plan, index: int) -> bool:
    return plan.decisions[index].stored_by not in ("", str(EVERYTHING))


def _parts(plans: Sequence[Plan]) -> Iterator[tuple[Plan, tuple[int, ...], int, bool]]:
    """Yield the operations that are recomputed together.

    Each item has a plan, its operations, how often they run, and whether they are in a loop.
    """
    for plan in plans:
        yield from _inside(plan, 1, Surroundings.WHOLE)


def _inside(
    plan: Plan, times: int, place: Surroundings
) -> Iterator[tuple[Plan, tuple[int, ...], int, bool]]:
    in_loop = place is Surroundings.LOOP
    saves = plan.settings.saves
    if saves.again is Again.MOST:
        # The segments of the whole function are those of one that stores nothing, so they are not
        # split.
        for unit in schedule(plan, out_kinds(plan), place):
            if isinstance(unit, Region):
                yield plan, unit.nodes, times, in_loop
    elif saves.names_values:
        # The plan is inside the user's own `jax.checkpoint`.
        alone = [index for index in range(len(plan.decisions)) if not is_apart(plan, index)]
        yield plan, tuple(alone), times, True
    for node, decision in zip(plan.graph.nodes, plan.decisions, strict=True):
        if decision.inner is None or node.structure is None:
            continue
        for inner, call in zip(inner_plans(decision.inner), node.structure.inner(), strict=True):
            yield from _inside(inner, times * call.times, place.within(node.name, is_last=False))


def _anchors(plan: Plan, nodes: Sequence[int], wanted: Sequence[set[int]]) -> set[int]:
    """Find operations to store, so that code outside loops is recomputed in parts.

    A part ends where few bytes are passed on, such as a residual stream between layers. With more
    parts, more bytes are stored at their ends, and fewer are in use while one part is recomputed.
    The bytes that an end may store are limited, and the limit with the smallest sum of both is
    taken.
    """
    live = crossing(plan, nodes)
    dear = [plan.decisions[index].barrier for index in nodes]
    ends = _lowest(plan, live, dear)
    limits = sorted({held_bytes(plan, live[place]) for place in ends})
    chosen: set[int] = set()
    least = held_bytes(plan, set().union(*wanted))
    for limit in limits:
        kept, largest = _cut(
            plan, live, wanted, [x for x in ends if held_bytes(plan, live[x]) <= limit]
        )
        if kept and (total := held_bytes(plan, kept) + largest) < least:
            chosen, least = kept, total
    return {maker for number in chosen if (maker := plan.graph.maker(number)) is not None}


def _cut(
    plan: Plan, live: Sequence[set[int]], wanted: Sequence[set[int]], ends: Sequence[int]
) -> tuple[set[int], int]:
    """Return the values stored if parts end at some places, and the most bytes a part needs."""
    kept: set[int] = set()
    largest = begin = 0
    for end in (*ends, len(wanted)):
        part = held_bytes(plan, set().union(*wanted[begin:end]) - kept)
        new = live[end] - kept if end < len(wanted) else set()
        # A part that needs hardly more than it keeps at its end is not worth a cut.
        if end == len(wanted) or part >= _WORTH * held_bytes(plan, new):
            kept |= new
            largest, begin = max(largest, part), end
    return kept, largest


def _lowest(plan: Plan, live: Sequence[set[int]], dear: Sequence[bool]) -> list[int]:
    """Find the place between each two expensive operations where the fewest bytes are passed on."""
    found: list[int] = []
    begin = 0
    for place in [place for place, is_dear in enumerate(dear) if is_dear]:
        if any(dear[:place]):
            # If there are several, take the last: after a sum, and not between its parts.
            within = reversed(range(begin, place + 1))
            found.append(min(within, key=lambda x: held_bytes(plan, live[x])))
        begin = place + 1
    return found


def _cost(plan: Plan, index: int, accelerator: Accelerator) -> tuple[float, float]:
    """Estimate the seconds, and the FLOPs of contractions, that running an operation again takes.

    An operation that is cheap to recompute counts an eighth of the time that writing its results
    takes: XLA fuses long chains of such operations, and fuses them with their readers.
    """
    graph, node = plan.graph, plan.graph.nodes[index]
    ins = [graph.aval(operand) for operand in node.ins]
    outs = [graph.avals[number] for number in node.outs]
    written = held_bytes(plan, node.outs) / accelerator.bandwidth
    if not plan.decisions[index].barrier:
        return written / 8, 0.0
    count = operation_flops(node.name, node.params, ins, outs)
    if node.name.startswith("ragged_dot") and accelerator.platform == "cuda":
        # XLA has no kernel for ragged dots on GPUs: every row meets the matrices of all groups, and
        # everything outside its own group is masked. TPUs have such a kernel. Blocks with scales
        # are multiplied in tiles of rows, which have padding.
        site = plan.decisions[index].site
        padding = None if site is None else site.padding
        count = int(count * (ins[2].shape[-1] if padding is None else padding))
    name = np.dtype(plan.settings.compute).name
    rate = accelerator.peak_flops.get(name) or max(accelerator.peak_flops.values())
    read = held_bytes(plan, [x for x in node.ins if not isinstance(x, Constant)])
    return max(count / rate, written + read / accelerator.bandwidth), float(count)


# The values that the derivative of an operation reads.


@dataclasses.dataclass(frozen=True)
class _Call:
    """An operation and the types of its operands; calls that are bound alike are equal."""

    node: Node = dataclasses.field(compare=False)
    avals: tuple[Any, ...] = dataclasses.field(compare=False)
    key: Hashable = None


def _key_of(graph: Graph, index: int) -> _Call:
    node = graph.nodes[index]
    avals = tuple(map(graph.aval, node.ins))
    params = tuple((name, _hashable(value)) for name, value in sorted(node.params.items()))
    constants = tuple(isinstance(operand, Constant) for operand in node.ins)
    return _Call(node, avals, (node.name, params, tuple(map(str, avals)), constants))


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


class _Needs:
    """The operands and results that the derivative of an operation reads, by position."""

    def __init__(self, call: _Call):
        node, avals = call.node, call.avals
        self.operands = set(range(len(node.ins)))
        self.results = set(range(len(node.outs)))
        moving = [
            position
            for position, aval in enumerate(avals)
            if not isinstance(node.ins[position], Constant)
            and jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact)
        ]
        if not moving:
            self.operands, self.results = set(), set()
            return
        try:
            jaxpr = jax.make_jaxpr(_differentiated(node, moving))(*map(_as_shape, avals)).jaxpr
        except Exception:
            # An operation that cannot be bound outside its program, such as a collective outside
            # its mesh, may read all of its operands and results.
            return
        count = len(node.outs)
        self._read(jaxpr, jaxpr.outvars[:count], jaxpr.outvars[count:])

    def _read(self, jaxpr: core.Jaxpr, outs: Sequence[Any], kept: Sequence[Any]) -> None:
        made = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
        found: set[Any] = set()
        waiting = [var for var in kept if not isinstance(var, core.Literal)]
        while waiting:
            var = waiting.pop()
            if var in found:
                continue
            found.add(var)
            if var in made and var not in outs:
                inputs = made[var].invars
                waiting += [x for x in inputs if not isinstance(x, core.Literal)]
        self.operands = {i for i, var in enumerate(jaxpr.invars) if var in found}
        self.results = {i for i, var in enumerate(outs) if var in found and var in made}

    def values(self, node: Node) -> set[int]:
        """Return the numbers of the values that the derivative of an operation reads."""
        operands = [node.ins[position] for position in self.operands]
        results = {node.outs[position] for position in self.results}
        return results | {x for x in operands if not isinstance(x, Constant)}


def _differentiated(node: Node, moving: Sequence[int]) -> Callable[..., Any]:
    def stored(*values: Any) -> Any:
        def of_moving(*moved: Any) -> list[Any]:
            given = list(values)
            for position, value in zip(moving, moved, strict=True):
                given[position] = value
            return list(bind_again(node.primitive, dict(node.params), given))

        # As in `explain`: the backward pass is a pytree whose leaves are the residuals.
        return jax.vjp(of_moving, *(values[position] for position in moving))

    return stored


def _as_shape(aval: Any) -> Any:
    if not hasattr(aval, "dtype"):
        return aval
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
