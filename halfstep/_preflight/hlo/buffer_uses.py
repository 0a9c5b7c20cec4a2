"""Find which instructions write and read the memory that a value of a program lies in.

A value passes through tuples, loops, branches and calls without being moved. The instruction that
XLA names as its definition often only passes it on: the residuals that a scan stacks up for the
backward pass are "defined" by the loop. The walk here goes on to the instructions that compute.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from halfstep._preflight.hlo.op_names import read
from halfstep._preflight.hlo.program import Instruction, Module, ShapeIndex

Position = tuple[Instruction, ShapeIndex]
"""A place where a value is seen: an instruction, and where in its result."""

# Instructions whose result is their operand, in the same memory.
_SAME = frozenset({"bitcast", "opt-barrier", "domain", "add-dependency"})
# Instructions that, inside a kernel or in a copy, do not tell where a value comes from.
_TRIVIAL = _SAME | {"copy", "copy-start", "copy-done", "reshape", "transpose", "slice", "pad"}
# The scope that a scan writes around each slice that it stacks up.
_STACKING = "jit(dynamic_update_index_in_dim)"
_FAR = 256
"""The most steps of a walk to a named instruction; no walk in a real program is as long."""


@dataclass(frozen=True, slots=True)
class Writer:
    """An instruction that writes into a buffer.

    Attributes:
        node: The instruction, as it is scheduled: often a fusion.
        index: Where in its result the value is.
        origin: The operation that computes the written value, inside a fusion or before it.
        in_loop: Whether it updates a part of the buffer in each iteration of a loop.
    """

    node: Instruction
    index: ShapeIndex
    origin: Instruction
    in_loop: bool


def _is_known(node: Instruction) -> bool:
    """Return whether an instruction names the operation of the step that it comes from."""
    return node.opcode != "parameter" and read(node.op_name).of != "unknown"


class BufferUses:
    """Walks through a program, forward to readers and backward to writers."""

    def __init__(self, module: Module):
        self._module = module
        self._users: dict[int, list[tuple[Instruction, int]]] = defaultdict(list)
        self._callers: dict[int, list[Instruction]] = defaultdict(list)
        for node in module.instructions.values():
            for position, operand in enumerate(node.operands):
                self._users[operand].append((node, position))
            for computation in node.called:
                self._callers[computation].append(node)

    def inside(self, node: Instruction) -> tuple[Instruction, ...]:
        """Return the instructions of a fusion, or the instruction itself."""
        if node.opcode != "fusion":
            return (node,)
        return tuple(self._module.computations[node.called[0]])

    def results(self, node: Instruction) -> tuple[Instruction, ...]:
        """Return the instructions that make a fusion's results, or the instruction itself."""
        if node.opcode != "fusion":
            return (node,)
        root = self._root(node.called[0])
        if root.opcode != "tuple":
            return (root,)
        return tuple(self._module.instructions[operand] for operand in root.operands)

    def writers(self, node: Instruction, index: ShapeIndex) -> tuple[Writer, ...]:
        """Find the instructions that compute a value, those in loops first."""
        found: dict[tuple[int, ShapeIndex], Writer] = {}
        seen: set[tuple[int, ShapeIndex]] = set()
        waiting = [(node, index)]
        while waiting:
            node, index = waiting.pop()
            if (node.id, index) in seen:
                continue
            seen.add((node.id, index))
            before = list(self._before(node, index))
            waiting += before
            if not before and node.opcode != "parameter":
                found[node.id, index] = self._writer(node, index)
        return tuple(sorted(found.values(), key=lambda one: not one.in_loop))

    def readers(self, *positions: Position) -> tuple[Instruction, ...]:
        """Find the readers of the values at some positions, wherever they are passed on to."""
        found: dict[int, Instruction] = {}
        seen: set[tuple[int, ShapeIndex]] = set()
        waiting = list(positions)
        while waiting:
            node, index = waiting.pop()
            if (node.id, index) in seen:
                continue
            seen.add((node.id, index))
            for user, operand in self._users[node.id]:
                behind = self._behind(user, operand, index)
                if behind is None and not _is_known(user) and user.opcode != "fusion":
                    # XLA:TPU moves a value nearer before it is read, by instructions without names.
                    behind = [(user, (0,) if user.opcode == "copy-start" else ())]
                if behind is None:
                    found[user.id] = user
                else:
                    waiting += behind
            if self._module.computations[node.computation].root is node:
                waiting += self._returned(node.computation, index)
        return tuple(found.values())

    def _behind(self, user: Instruction, operand: int, index: ShapeIndex) -> list[Position] | None:
        """Find where an instruction passes an operand on to; `None` if it reads the operand."""
        match user.opcode:
            case "get-tuple-element":
                return [(user, index[1:])] if index[:1] == (user.element,) else []
            case "tuple":
                return [(user, (operand, *index))]
            case "while":
                return [(user, index), *((p, index) for p in self._parameters(user, 0))]
            case "call" | "async-start":
                return [(p, index) for p in self._parameters(user, operand)]
            case "conditional":
                if not operand:
                    return None
                called = user.called[operand - 1 : operand]
                return [(p, index) for c in called for p in self._parameters_of(c, 0)]
            case opcode if opcode in _SAME:
                return [(user, index)] if not operand else []
            case opcode if opcode.endswith(("-done", "-update")):
                return [(user, self._done(user, index))]
            case _:
                return None

    def _returned(self, computation: int, index: ShapeIndex) -> Iterator[Position]:
        """Find where the callers of a computation see its result."""
        for caller in self._callers[computation]:
            if caller.opcode == "while":
                yield caller, index
                yield from ((p, index) for p in self._parameters(caller, 0))
            elif caller.opcode in ("call", "conditional"):
                yield caller, index
            elif caller.opcode == "async-start":
                yield caller, (1, *index)

    def _before(self, node: Instruction, index: ShapeIndex) -> Iterator[Position]:
        """Find where an instruction gets a value that it passes on; nothing if it computes it."""
        nodes = self._module.instructions
        match node.opcode:
            case "get-tuple-element":
                yield nodes[node.operands[0]], (node.element, *index)
            case "tuple" if index:
                yield nodes[node.operands[index[0]]], index[1:]
            case "while":
                yield nodes[node.operands[0]], index
                # The body returns the carry as a tuple; the condition does not return a tuple.
                yield from ((root, index) for root in self._roots(node) if root.opcode == "tuple")
            case "call" | "conditional":
                yield from ((root, index) for root in self._roots(node))
            case "async-start" if index[:1] == (1,):
                yield from ((root, index[1:]) for root in self._roots(node))
            case "parameter":
                for caller in self._callers[node.computation]:
                    if caller.opcode == "while":
                        yield nodes[caller.operands[0]], index
                        yield caller, index
                    elif caller.opcode in ("call", "async-start"):
                        yield from ((given, index) for given in self._given(caller, node))
                    elif caller.opcode == "conditional":
                        branch = caller.called.index(node.computation)
                        yield nodes[caller.operands[branch + 1]], index
            case opcode if opcode in _SAME:
                yield nodes[node.operands[0]], index
            case opcode if opcode.endswith(("-done", "-update")):
                start = nodes[node.operands[0]]
                yield start, self._started(start, index)
            case _:
                return

    def _given(self, caller: Instruction, parameter: Instruction) -> tuple[Instruction, ...]:
        """Return what a call passes as a parameter, if the program says so.

        The calls that a TPU's compiler makes to a sparse core have no operands.
        """
        given = caller.operands[parameter.parameter : parameter.parameter + 1]
        return tuple(self._module.instructions[operand] for operand in given)

    def _writer(self, node: Instruction, index: ShapeIndex) -> Writer:
        origin, updates = self._origin(node, index)
        return Writer(node, index, origin, updates and node.computation != self._module.entry.id)

    def _origin(self, node: Instruction, index: ShapeIndex) -> tuple[Instruction, bool]:
        """Find the operation that computes what is written, and whether it only updates a part."""
        nodes, outer = self._module.instructions, list[Instruction]()
        first, updates = node, False
        for _ in range(_FAR):
            if node.opcode == "fusion":
                outer.append(node)
                node = self._root(node.called[0])
                if node.opcode == "tuple" and index:
                    node, index = nodes[node.operands[index[0]]], index[1:]
            elif node.opcode == "dynamic-update-slice":
                # Follow the update, not the stack that it is written into.
                updates, node = True, nodes[node.operands[1]]
            elif node.opcode == "parameter":
                if outer and outer[-1].called[0] == node.computation:
                    node = nodes[outer.pop().operands[node.parameter]]
                    continue
                # A kernel that runs at the same time as others is in a computation of its own.
                callers = self._callers[node.computation]
                if len(callers) != 1:
                    break
                if callers[0].opcode in ("call", "async-start"):
                    given = self._given(callers[0], node)
                    if not given:
                        break
                    node = given[0]
                elif callers[0].opcode == "while" and index:
                    # An iteration gets the values that the previous iteration returned.
                    node = self._root(node.computation)
                    if node.opcode != "tuple":
                        break
                    node, index = nodes[node.operands[index[0]]], index[1:]
                else:
                    break
            elif node.opcode == "get-tuple-element":
                index, node = (node.element, *index), nodes[node.operands[0]]
            elif node.operands and (node.opcode in _TRIVIAL or _STACKING in node.op_name):
                index = index[1:] if node.opcode == "copy-start" else index
                node = nodes[node.operands[0]]
            else:
                break
        # The walk can end at an instruction without a name, such as a loop's own parameter.
        return next((n for n in (node, first) if _is_known(n)), self._known(first)), updates

    def _known(self, node: Instruction) -> Instruction:
        """Find the nearest earlier instruction that has a name, or an argument of the program.

        A copy of a parameter in another dtype, which the compiler makes before a loop, has no name.
        """
        seen, waiting = {node.id}, [node]
        for at in waiting:
            is_argument = at.opcode == "parameter" and at.computation == self._module.entry.id
            if is_argument or _is_known(at):
                return at
            before = [self._module.instructions[operand] for operand in at.operands]
            if at.opcode == "fusion":
                before = [self._root(at.called[0]), *before]
            waiting += [one for one in before if one.id not in seen]
            seen |= {one.id for one in before}
            if len(waiting) > _FAR:
                break
        return node

    def _done(self, done: Instruction, index: ShapeIndex) -> ShapeIndex:
        """Find where a value of a `-start` is in the result of its `-done`."""
        start = self._module.instructions[done.operands[0]]
        return index if start.opcode == "all-reduce-start" else index[1:]

    def _started(self, start: Instruction, index: ShapeIndex) -> ShapeIndex:
        """Find where a value of a `-done` is in the result of its `-start`."""
        if start.opcode == "all-reduce-start" or start.opcode.endswith("-update"):
            return index
        return (0 if start.opcode == "copy-start" else 1, *index)

    def _root(self, computation: int) -> Instruction:
        return self._module.computations[computation].root

    def _roots(self, node: Instruction) -> Iterator[Instruction]:
        return (self._root(computation) for computation in node.called)

    def _parameters(self, node: Instruction, number: int) -> Iterator[Instruction]:
        return (p for c in node.called for p in self._parameters_of(c, number))

    def _parameters_of(self, computation: int, number: int) -> Iterator[Instruction]:
        for node in self._module.computations[computation]:
            if node.opcode == "parameter" and node.parameter == number:
                yield node
