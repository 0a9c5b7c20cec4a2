"""Find the state of loops: the carries in which rounding errors add up.

A loop hands its carries from one iteration to the next. If a carry reaches itself by arithmetic (a
sum, a decay, a maximum), every iteration adds a rounding error to those before, and a sum in 16
bits even stalls. Such a carry is *state* and stays float32. If every path to itself goes through a
contraction, as in a recurrent network's `tanh(h @ w)`, the carry is an *activation*: the
contraction rounds what it reads anyway.

The residual stream of a network has paths of both kinds, `h + f(h @ w)`. If the contractions read
weights of their own in each iteration, the loop is a stack of layers that is written as a loop, and
its carry is an activation, as it would be without the loop. Otherwise the loop is a recurrence, in
which errors add up: from `LONG` iterations on, its carry is state. Nobody knows how often a `while`
loop runs, and it has no reverse derivative for which anything would be stored: its carries are
state.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp

from halfstep._autocast.primitives import CONTRACTIONS, DEAR, PASSING
from halfstep._program import (
    Constant,
    Graph,
    Node,
    Operand,
    Remat,
    Scan,
    While,
    equations,
    functions_in,
)

LONG = 128
"""The iterations from which on a recurrence through shared weights is state."""


class Origins(NamedTuple):
    """The inputs of a function that a value depends on, as bits, by the paths that lead to it."""

    same: int = 0
    """Inputs that are the value itself."""
    free: int = 0
    """Inputs with a path of operations that are not contractions."""
    shared: int = 0
    """Inputs with a path through contractions that all read shared weights or activations."""
    own: int = 0
    """Inputs with a path through a contraction that reads weights of its own in each iteration."""
    iterations: float = 1.0
    """The most iterations of inner loops that a path to the value passes."""

    def __or__(self, other: "Origins") -> "Origins":
        same, free, shared, own = (a | b for a, b in zip(self[:4], other[:4], strict=True))
        return Origins(same, free, shared, own, max(self.iterations, other.iterations))

    def moved(self) -> "Origins":
        """Return the origins of what an operation other than a contraction makes of the value."""
        return Origins(0, self.same | self.free, self.shared, self.own, self.iterations)

    def contracted(self, *, by_own: bool) -> "Origins":
        """Return the origins of a product of the value, with weights of its own or with others."""
        free = self.same | self.free | self.shared
        if by_own:
            return Origins(0, 0, 0, free | self.own, self.iterations)
        return Origins(0, 0, free, self.own, self.iterations)


_NOWHERE = Origins()


@dataclasses.dataclass(frozen=True)
class Traits:
    """The paths to a value, and whether it is a weight."""

    origins: Origins = _NOWHERE
    is_weight: bool = False
    """Whether it is made of parameters and constants only."""
    is_own: bool = False
    """Whether it is a weight that no other iteration reads."""


def follow(graph: Graph, ins: Sequence[Traits]) -> list[Traits]:
    """Follow all floating-point values of a function from its inputs to all its values.

    A path through an integer or a boolean does not count: no rounding error passes it.
    """
    found = [Traits(is_weight=True)] * len(graph.avals)
    for number, traits in zip(graph.inputs, ins, strict=True):
        found[number] = traits if is_float(graph.avals[number]) else Traits()
    for node in graph.nodes:
        for number, traits in zip(node.outs, _results(node, graph, found), strict=True):
            found[number] = traits if is_float(graph.avals[number]) else Traits()
    return found


def _results(node: Node, graph: Graph, found: Sequence[Traits]) -> list[Traits]:
    given = [Traits() if isinstance(operand, Constant) else found[operand] for operand in node.ins]
    if node.is_call:
        return _called(node, given)
    floats = [
        traits
        for traits, operand in zip(given, node.ins, strict=True)
        if not isinstance(operand, Constant) and is_float(graph.avals[operand])
    ]
    made = _NOWHERE
    is_contraction = contracts(node)
    for position, traits in enumerate(floats):
        others = (*floats[:position], *floats[position + 1 :])
        by_own = any(other.is_own for other in others)
        one = traits.origins
        made |= one.contracted(by_own=by_own) if is_contraction else one.moved()
    is_weight = all(traits.is_weight for traits in floats)
    is_own = is_weight and any(traits.is_own for traits in floats)
    return [Traits(made, is_weight, is_own)] * len(node.outs)


def _called(node: Node, given: Sequence[Traits]) -> list[Traits]:
    """Return the results of a loop, a branch or a call."""
    made = [Traits(is_weight=True)] * len(node.outs)
    calls = node.structure.inner() if node.structure is not None else ()
    for call, graph in zip(calls, node.graphs, strict=True):
        if call.is_test:
            continue
        ins = [given[operand] for operand in call.operands or ()]
        ends = _after(graph, ins, call.carried)
        if call.is_loop:
            times = math.inf if isinstance(node.structure, While) else call.times
            for place in range(len(call.carried)):
                ends[place] = _passing(ends[place], times * ends[place].origins.iterations)
        made = [_either(*pair) for pair in zip(made, ends, strict=True)]
    return made


def _either(one: Traits, other: Traits) -> Traits:
    is_weight = one.is_weight and other.is_weight
    return Traits(one.origins | other.origins, is_weight, one.is_own or other.is_own)


def _passing(traits: Traits, iterations: float) -> Traits:
    return dataclasses.replace(traits, origins=traits.origins._replace(iterations=iterations))


def _after(graph: Graph, ins: Sequence[Traits], carried: range) -> list[Traits]:
    """Return the results of a function, after any number of iterations if it is a loop's body."""
    current = list(ins)
    while True:
        values = follow(graph, current)
        ends = [
            Traits(is_weight=True) if isinstance(operand, Constant) else values[operand]
            for operand in graph.outputs
        ]
        before = [current[position] for position in carried]
        joined = [
            # The iterations of inner loops that one iteration passes, not those of all together.
            _passing(_either(old, new), old.origins.iterations)
            for old, new in zip(before, ends, strict=False)
        ]
        # Bits are only ever added, so this ends.
        if joined == before:
            return ends
        current[carried.start : carried.stop] = joined


def is_float(aval: object) -> bool:
    """Return whether a value holds floating-point numbers, which rounding errors pass."""
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.inexact)


def contracts(node: Node) -> bool:
    """Return whether an operation is a contraction, or holds one that nobody looks into."""
    if node.name in CONTRACTIONS:
        return True
    if node.structure is None:
        return node.name in DEAR
    inside = functions_in(node.name, node.params)
    return any(
        equation.primitive.name in CONTRACTIONS
        for function in inside
        for equation in equations(function.jaxpr)
    )


# How a loop's carries are read.


Reading = Literal["state", "activation", "neither"]


@dataclasses.dataclass(frozen=True)
class Carry:
    """A floating-point carry of a loop, as autocast reads it."""

    number: int
    """Its place among the carries."""
    name: str
    """Its name in the body, as far as JAX says."""
    reading: Reading
    reason: str
    by: str = ""
    """The user's rule that has decided, if one has."""

    @property
    def is_state(self) -> bool:
        """Whether it stays float32 in all iterations."""
        return self.reading == "state"


class StatePath(NamedTuple):
    """Where state enters and leaves a function or an operation, by position."""

    ins: frozenset[int] = frozenset()
    outs: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()
    """The inputs that are made of parameters and constants alone, without a product."""
    fed: frozenset[int] = frozenset()
    """The results that state behind a `jax.checkpoint` is computed with."""


NO_STATE = StatePath()


def carries_of(node: Node, around: StatePath = NO_STATE) -> tuple[Carry, ...]:
    """Return how each floating-point carry of a loop is read.

    Args:
        node: The operation; one that is not a loop has no carries.
        around: The state of a loop around this one, and the operands that are weights.
    """
    if not isinstance(node.structure, Scan | While):
        return ()
    body, graph = node.structure.inner()[-1], node.graphs[-1]
    names = body.function.jaxpr.debug_info.arg_names or ()
    is_while = isinstance(node.structure, While)
    ins = []
    for position, operand in enumerate(body.operands or ()):
        place = position - body.carried.start
        origins = Origins(same=1 << place) if position in body.carried else _NOWHERE
        is_weight = operand in around.weights and position not in body.carried
        ins.append(Traits(origins, is_weight, is_weight and position in body.sliced))
    ends = [end.origins for end in _after(graph, ins, body.carried)[: len(body.carried)]]
    reached = [end.same | end.free | end.shared | end.own for end in ends]
    found = []
    for place, end in enumerate(ends):
        # The carries that this one depends on, and that depend on it.
        circle = [
            other.iterations
            for number, other in enumerate(ends)
            if reached[place] >> number & 1 and reached[number] >> place & 1
        ]
        times = math.inf if is_while else body.times * max(circle, default=1)
        free, shared, own = (bool(bits >> place & 1) for bits in (end.free, end.shared, end.own))
        position = body.carried[place]
        operand = (body.operands or ())[position]
        if not is_float(graph.avals[graph.inputs[position]]):
            continue
        reading, reason = _read(free, shared, own, length=times)
        if not (free or shared or own) and end.same >> place & 1:
            reason = "every iteration hands it on unchanged"
        elif reading == "activation" and operand in around.ins and place in around.outs:
            reading, reason = "state", "it is state of a loop around this one"
        name = names[position] if position < len(names) else ""
        found.append(Carry(place, name or f"carry {place}", reading, reason))
    return tuple(found)


def _read(free: bool, shared: bool, own: bool, *, length: float) -> tuple[Reading, str]:
    """Return how a carry is read by the kinds of paths to itself, and why."""
    if not (free or shared or own):
        return "neither", "every iteration makes it anew"
    if length == math.inf:
        return "state", "nobody knows how often a `while` loop runs"
    if not (shared or own):
        return "state", "it reaches itself without a matrix product"
    if not free:
        return "activation", "it reaches itself only through matrix products"
    if not shared:
        return "activation", "each iteration multiplies it with weights of its own"
    if length >= LONG:
        return "state", f"it adds up over {length:.0f} iterations, {LONG} or more"
    return "activation", f"it adds up over {length:.0f} iterations, fewer than {LONG}"


# The operations on the way from the state of one iteration to that of the next.


def state_nodes(graph: Graph, path: StatePath) -> dict[int, StatePath]:
    """Return the operations that lie on the paths of state through a function."""
    if not (path.ins and path.outs):
        return {}
    start = Traits(Origins(same=1))
    ins = [start if place in path.ins else Traits() for place in range(len(graph.inputs))]
    after = {
        number
        for number, traits in enumerate(follow(graph, ins))
        if traits.origins.same or traits.origins.free
    }
    before = {graph.outputs[place] for place in path.outs}
    found: dict[int, StatePath] = {}
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        outs = frozenset(p for p, number in enumerate(node.outs) if number in before & after)
        if not outs or (contracts(node) and not node.is_call):
            continue
        operands = {p: o for p, o in enumerate(node.ins) if not isinstance(o, Constant)}
        before |= {operand for operand in operands.values() if operand in after}
        found[index] = StatePath(frozenset(p for p, o in operands.items() if o in after), outs)
    return found


def feeding_nodes(
    graph: Graph, path: StatePath, state: Mapping[int, StatePath]
) -> dict[int, frozenset[int]]:
    """Return the arithmetic that makes what state is computed with, up to the next contraction.

    It runs in float32, too: the factor `1 + u` of a product over iterations has lost most of `u`
    once it is rounded to 16 bits, and a rounded gain is off in the same direction every time.

    Args:
        graph: The function.
        path: Where state enters and leaves it.
        state: The operations that lie on the paths of state through it.

    Returns:
        For each operation, the results that state is computed with.
    """
    return _feeding(graph, path, state)[0]


def _feeding(
    graph: Graph, path: StatePath, state: Mapping[int, StatePath]
) -> tuple[dict[int, frozenset[int]], set[int]]:
    """Return what `feeding_nodes` does, and the inputs that state is computed with."""
    found: dict[int, frozenset[int]] = {}
    waiting = [graph.outputs[place] for place in path.fed]
    for index, own in state.items():
        waiting += _feeding_operands(graph.nodes[index], own)
    seen: set[int] = set()
    while waiting:
        number = waiting.pop()
        if isinstance(number, Constant) or number in seen:
            continue
        seen.add(number)
        maker = graph.maker(number)
        if maker is None:
            continue
        node, own = graph.nodes[maker], state.get(maker, NO_STATE)
        place = node.outs.index(number)
        is_remat = isinstance(node.structure, Remat)
        if place in own.outs or (maker in state and not is_remat):
            continue
        if is_remat or (node.structure is None and not contracts(node)):
            fed = found[maker] = found.get(maker, frozenset()) | {place}
            waiting += _feeding_operands(node, own._replace(fed=fed))
    return found, {place for place, number in enumerate(graph.inputs) if number in seen}


def _feeding_operands(node: Node, path: StatePath) -> list[Operand]:
    """Return the operands that state is computed with; a `jax.checkpoint` as if written out."""
    if not isinstance(node.structure, Remat):
        return list(node.ins)
    ((inner, _),), (graph,) = paths_inside(node, (), path), node.graphs
    _, places = _feeding(graph, inner, state_nodes(graph, inner))
    return [node.ins[place] for place in places]


def paths_inside(
    node: Node, carries: Sequence[Carry], path: StatePath
) -> list[tuple[StatePath, tuple[int, ...]]]:
    """Return where state enters and leaves each function inside an operation.

    Args:
        node: The operation.
        carries: How its carries are read, if it is a loop.
        path: Where state of a loop around it enters and leaves the operation.

    Returns:
        For each function, the path in it, and the operand that each of its inputs takes.
    """
    state = {carry.number for carry in carries if carry.is_state}
    made = []
    for call in node.structure.inner() if node.structure is not None else ():
        operands = call.operands or ()
        ins = {place for place, operand in enumerate(operands) if operand in path.ins}
        ins |= {call.carried.start + number for number in state}
        outs = frozenset() if call.is_test else path.outs | state
        weights = {
            place
            for place, operand in enumerate(operands)
            if operand in path.weights and place not in call.carried
        }
        fed = path.fed if isinstance(node.structure, Remat) else frozenset[int]()
        made.append((StatePath(frozenset(ins), outs, frozenset(weights), fed), operands))
    return made


def exact_operands(node: Node, carries: Sequence[Carry], path: StatePath) -> frozenset[int]:
    """Return the operands that state is computed with, inside an operation that holds functions.

    A decay of 0.999 that is rounded to 1 would be as wrong as a state that is rounded.
    """
    found: set[int] = set()
    for (inner, operands), graph in zip(
        paths_inside(node, carries, path), node.graphs, strict=False
    ):
        positions = {number: place for place, number in enumerate(graph.inputs)}
        paths = state_nodes(graph, inner)
        waiting: list[int] = []
        for index, one in enumerate(graph.nodes):
            places: Collection[int] = range(len(one.ins)) if index in paths else ()
            if one.is_call:
                places = exact_operands(one, carries_of(one), paths.get(index, NO_STATE))
            waiting += [o for p in places if not isinstance(o := one.ins[p], Constant)]
        seen: set[int] = set()
        while waiting:
            number = waiting.pop()
            if number in seen:
                continue
            seen.add(number)
            maker = graph.maker(number)
            if maker is not None and graph.nodes[maker].name in PASSING:
                waiting += [o for o in graph.nodes[maker].ins if not isinstance(o, Constant)]
        found |= {operands[positions[number]] for number in seen if number in positions}
    return frozenset(found)
