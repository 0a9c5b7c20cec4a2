"""Represent a program as a tree of functions, and select which of their values are sites."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from halfstep._base import NAME as SETTLE, ClosedJaxpr
from halfstep._explain import typed
from halfstep._program import (
    UNKNOWN,
    Constant,
    Finder,
    Graph,
    Inner,
    Node,
    Operand,
    Source,
    graph_of,
    is_of_jax,
)
from halfstep.debug._instrument.site import Pass, Site
from halfstep.debug._instrument.stats import is_recorded

ARGUMENT = "argument"
TURN_INPUT = "slice of a loop's input"
RECOMPUTED = "rematted_computation"
# The result of such an operation is finite if and only if its operand is, and as large.
_MOVES = frozenset(
    {
        *("abs", "neg", "copy", "copy_p", "device_put", "name", "stop_gradient"),
        *("broadcast_in_dim", "expand_dims", "reshape", "squeeze", "tile", "transpose", "rev"),
        *("dynamic_slice", "slice", "split", "optimization_barrier", "halfstep_apart"),
        *("mesh_cast", "pcast", "pvary", "reshard", "sharding_constraint"),
        SETTLE,
    }
)

Select = Callable[["Body"], frozenset[int]]
"""Selects the values of a body that are sites, by number."""
Group = tuple[str, Source, Pass, int | None]
"""The key of a group: scope, line, pass, and an operation's number if it forms its own group."""


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Body:
    """A traced function, its place in the program, and the functions inside it."""

    graph: Graph
    within: tuple[str, ...]
    loops: tuple[str, ...]
    stages: tuple[Pass, ...]
    """The pass of each operation."""
    stacks: tuple[str, ...]
    """The name stack of each operation, from the outermost function on."""
    lines: tuple[Source, ...]
    """The source line of each operation."""
    inner: Mapping[int, tuple["Body", ...]]
    """The functions inside operations, by the operation's number."""
    turn_inputs: frozenset[int] = frozenset()
    """Inputs that are a different slice in every iteration of a loop."""
    called: Inner | None = None
    """How the operation calls the function; `None` for the outermost one."""
    paths: tuple[str, ...] = ()
    """For the outermost function, the path of each input in the call."""
    carried: frozenset[int] = frozenset()
    """For the outermost function, the inputs whose successors it returns, by position."""

    def root(self, operand: Operand) -> Operand:
        """Return the value that an operand was moved from."""
        while not isinstance(operand, Constant):
            maker = self.graph.maker(operand)
            if maker is None or self.graph.nodes[maker].name not in _MOVES:
                break
            node = self.graph.nodes[maker]
            # A barrier has one result per operand. All other moves take the value first: a slice
            # has indices after it, and a split has several results.
            paired = len(node.ins) == len(node.outs)
            operand = node.ins[node.outs.index(operand) if paired else 0]
        return operand

    def is_move(self, index: int) -> bool:
        """Return whether an operation only moves a value."""
        return self.graph.nodes[index].name in _MOVES

    def live(self) -> frozenset[int]:
        """Return the operations that are not constant, and that are used or have effects."""
        return self._used() - self._constant()

    def _constant(self) -> frozenset[int]:
        known: set[int] = set()
        found = set()
        for index, node in enumerate(self.graph.nodes):
            # An operation without operands may still differ between devices, as `axis_index` does.
            if node.ins and all(isinstance(o, Constant) or o in known for o in node.ins):
                found.add(index)
                known.update(node.outs)
        return frozenset(found)

    def _used(self) -> frozenset[int]:
        needed = {o for o in self.graph.outputs if not isinstance(o, Constant)}
        found = set()
        for index in range(len(self.graph.nodes) - 1, -1, -1):
            node = self.graph.nodes[index]
            if node.effects or not needed.isdisjoint(node.outs):
                found.add(index)
                needed.update(o for o in node.ins if not isinstance(o, Constant))
        return frozenset(found)


def body_of(function: ClosedJaxpr, paths: Sequence[str], carried: frozenset[int]) -> Body:
    """Build the tree of a traced function and all functions inside it."""
    around = _Around(for_backward=(False,) * len(function.jaxpr.outvars))
    return _body(function, around, Finder(), paths=tuple(paths), carried=carried)


@dataclasses.dataclass(frozen=True)
class _Around:
    """Information about a function from the place where it is called."""

    scope: str = ""
    stack: str = ""
    stage: Pass = "forward"
    for_backward: tuple[bool, ...] = ()
    """For each result, whether only the backward pass uses it."""
    within: tuple[str, ...] = ()
    loops: tuple[str, ...] = ()
    line: Source | None = None


def _body(function: ClosedJaxpr, around: _Around, finder: Finder, **known: Any) -> Body:
    graph = graph_of(function, around.scope)
    stacks = tuple(f"{around.stack}/{node.source.name_stack}" for node in graph.nodes)
    lines = tuple(around.line or finder.find(node.source.traceback) for node in graph.nodes)
    stages, for_backward = _stages(graph, stacks, around)
    inner = {}
    for index, node in enumerate(graph.nodes):
        if is_looked_into(node):
            # Name stacks inside a function start at that function. The operation's own stack is put
            # in front, so that the body of a loop in the backward pass is recognized as backward.
            found = _Around(
                node.scope,
                stacks[index],
                stages[index],
                tuple(number in for_backward for number in node.outs),
                around.within,
                around.loops,
            )
            inner[index] = tuple(_inside(node, found, lines[index], finder))
    return Body(
        graph,
        around.within,
        around.loops,
        stages,
        stacks,
        lines,
        MappingProxyType(inner),
        **known,
    )


def _inside(node: Node, around: _Around, line: Source, finder: Finder) -> Iterator[Body]:
    structure = node.structure
    for inner in () if structure is None else structure.inner():
        # A loop's test is left out, because only its answer is used.
        if not inner.is_test:
            where = dataclasses.replace(
                around,
                within=(*around.within, inner.label),
                loops=(*around.loops, inner.label) if inner.is_loop else around.loops,
                # JAX's own functions, such as relu, get the line of their call.
                line=line if is_of_jax(inner.function.jaxpr) else None,
            )
            sliced = frozenset(inner.sliced)
            yield _body(inner.function, where, finder, turn_inputs=sliced, called=inner)


def is_looked_into(node: Node) -> bool:
    """Return whether values inside an operation can be recorded."""
    return node.structure is not None and not node.structure.is_opaque


def _stages(
    graph: Graph, stacks: Sequence[str], around: _Around
) -> tuple[tuple[Pass, ...], set[int]]:
    """Return the pass of each operation, and the values that only the backward pass uses."""
    # Name stacks mark only differentiation. The update is the rest: operations that use gradients,
    # or that the loss does not depend on, such as the step count of an optimizer.
    known: list[Pass | None] = [_written_stage(stack) for stack in stacks]
    before = _made_into(graph, [stage is not None for stage in known])
    found: list[Pass] = []
    after: set[int] = set()
    for index, (node, stage) in enumerate(zip(graph.nodes, known, strict=True)):
        if stage is None:
            late = any(not isinstance(o, Constant) and o in after for o in node.ins)
            beside = "backward" in known and index not in before
            stage: Pass | None = "update" if late or beside else around.stage
        if stage != "forward":
            after.update(node.outs)
        found.append(stage)
    # Values that the forward pass computes only for the backward pass are factors of a derivative,
    # such as the `0.5 / sqrt(x)` of a root. JAX computes them early and names them as forward. But
    # if such a factor is infinite, the derivative is to blame: the loss may well be finite.
    only = {
        out
        for out, alone in zip(graph.outputs, around.for_backward, strict=True)
        if alone and not isinstance(out, Constant)
    }
    others = {
        out
        for out, alone in zip(graph.outputs, around.for_backward, strict=True)
        if not alone and not isinstance(out, Constant)
    }
    # Backwards, so that all users of a value are known when its operation is reached.
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        used = [number for number in node.outs if number in only or number in others]
        is_factor = bool(used) and others.isdisjoint(used)
        if is_factor and found[index] == "forward" and not is_looked_into(node):
            found[index] = "backward"
        users = only if found[index] == "backward" else others
        users.update(o for o in node.ins if not isinstance(o, Constant))
    return tuple(found), only - others


def _written_stage(stack: str) -> Pass | None:
    """Return the pass that JAX writes into an operation's name stack, or `None`."""
    # Checked first: `jax.checkpoint` recomputes inside the backward pass, so the stack of a
    # recomputed operation also contains `transpose(`.
    if RECOMPUTED in stack:
        return "forward"
    if "transpose(" in stack:
        return "backward"
    return "forward" if "jvp(" in stack else None


def _made_into(graph: Graph, marked: Sequence[bool]) -> frozenset[int]:
    """Return the marked operations, and all operations whose results they depend on."""
    needed: set[int] = set()
    found = set()
    for index in range(len(graph.nodes) - 1, -1, -1):
        node = graph.nodes[index]
        if marked[index] or not needed.isdisjoint(node.outs):
            found.add(index)
            needed.update(o for o in node.ins if not isinstance(o, Constant))
    return frozenset(found)


# Sites.


def every_operation(body: Body) -> frozenset[int]:
    """Select all results, all arguments, and the slices that each loop iteration is given."""
    live = body.live()
    # The results of an operation with inner functions are recorded inside these functions.
    found = {
        number
        for index in live
        if index not in body.inner and not body.is_move(index)
        for number in body.graph.nodes[index].outs
    }
    if body.within:
        found |= {body.graph.inputs[position] for position in body.turn_inputs}
    else:
        found |= set(body.graph.inputs)
    return _recordable(body, found)


def between_lines(body: Body) -> frozenset[int]:
    """Select the values passed from one line of the user's code or one named scope to another.

    The update contributes only the values that it returns. Arguments are selected only if their
    successors are not returned.
    """
    graph = body.graph
    found: set[int] = set()
    if not body.within:
        found |= {n for at, n in enumerate(graph.inputs) if at not in body.carried}

    def group(index: int) -> Group:
        node = graph.nodes[index]
        # A loop or a branch forms a group of its own. So the values that enter it are recorded even
        # if everything is on one line.
        alone = index if index in body.inner else None
        return node.scope, body.lines[index], body.stages[index], alone

    live = body.live()

    def hand_on(operand: Operand, user: Group | None) -> None:
        # Skip casts that widen: the value may have overflowed before them, not in them.
        root = body.root(operand)
        maker = graph.maker(root)
        while maker is not None and _widens(graph, maker):
            root = body.root(graph.nodes[maker].ins[0])
            maker = graph.maker(root)
        if maker in live and maker not in body.inner and group(maker) != user:
            found.add(root)  # pyright: ignore[reportArgumentType]

    for index in live:
        if not body.is_move(index) and body.stages[index] != "update":
            for operand in graph.nodes[index].ins:
                hand_on(operand, group(index))
    # The caller belongs to no group. Results are the only sites of the update: its operations,
    # about a dozen per parameter, would outnumber all others.
    for operand in graph.outputs:
        hand_on(operand, None)
    return _recordable(body, found)


def _widens(graph: Graph, index: int) -> bool:
    """Return whether an operation is a cast in which nothing overflows."""
    node = graph.nodes[index]
    if node.name != "convert_element_type":
        return False
    before, after = graph.aval(node.ins[0]).dtype, graph.avals[node.outs[0]].dtype
    if not (jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)):
        return False
    # bfloat16's largest number is only 0.4 % below float32's, so a cast to it counts as safe.
    return float(jnp.finfo(after).max) * 1.01 >= float(jnp.finfo(before).max)


def _recordable(body: Body, numbers: set[int]) -> frozenset[int]:
    return frozenset(n for n in numbers if is_recorded(body.graph.avals[n]))


def site_of(body: Body, number: int) -> Site:
    """Describe a value as a site."""
    maker, aval = body.graph.maker(number), body.graph.avals[number]
    if maker is None:
        position = body.graph.inputs.index(number)
        path = body.paths[position] if body.paths else ""
        op = ARGUMENT if body.paths else TURN_INPUT
        # A slice of the input of a loop belongs to the pass of that loop.
        stage: Pass = body.stages[0] if body.stages and not body.paths else "forward"
        return Site(op, UNKNOWN, "", stage, False, body.within, body.loops, typed(aval), path)
    node = body.graph.nodes[maker]
    return Site(
        node.name,
        body.lines[maker],
        "/".join(part for part in node.scope.split("/") if part != RECOMPUTED),
        body.stages[maker],
        RECOMPUTED in body.stacks[maker],
        body.within,
        body.loops,
        typed(aval),
    )
