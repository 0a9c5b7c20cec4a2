"""Work out how many iterations a loop of an optimized HLO program has.

XLA:GPU and XLA:CPU note the number. XLA:TPU does not, so it is worked out here: the condition
compares one element of the loop's state with a constant, the body adds a constant to that element,
and the state starts from a constant. Constants are followed through copies, tuples, fusions and
outer loops.
"""

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType

from halfstep._preflight.hlo.program import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SAME_VALUE = frozenset(
    ("bitcast", "convert", "copy", "copy-done", "copy-start", "opt-barrier", "reshape")
)
_FLIPPED = MappingProxyType(
    {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}
)

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Element:
    """An element of a loop's state at the beginning of an iteration, plus a constant."""

    path: Path
    offset: int = 0


# The domain of an abstract interpreter: a known number, an element of the state plus a constant, or
# an unknown value. Loop counters need nothing else.
Value = int | _Element | None


@dataclass(frozen=True, slots=True)
class ValueFrame:
    """A computation together with what is known of its arguments."""

    module: Module
    computation: Computation
    argument: Callable[[int, Path], Value] = lambda number, path: None
    known: dict[tuple[int, Path], Value] = field(default_factory=dict, repr=False)

    def call(
        self, instruction: Instruction, computation: Computation, *, first: int = 0
    ) -> "ValueFrame":
        """Return the frame of a computation that gets an instruction's operands from `first` on."""
        operands = instruction.operands[first:]

        def argument(number: int, path: Path) -> Value:
            return self.value(operands[number], path) if number < len(operands) else None

        return ValueFrame(self.module, computation, argument)

    def value(self, number: int, path: Path = ()) -> Value:
        """Return what is known about an instruction's value, or about one element of a tuple."""
        if (number, path) not in self.known:
            self.known[number, path] = self._value(self.computation[number], path)
        return self.known[number, path]

    def _value(self, instruction: Instruction, path: Path) -> Value:
        match instruction.opcode:
            case "constant":
                return None if path else instruction.number
            case "parameter":
                return self.argument(instruction.parameter, path)
            case "get-tuple-element":
                return self.value(instruction.operands[0], (instruction.element, *path))
            case "tuple":
                return self.value(instruction.operands[path[0]], path[1:]) if path else None
            case "add" | "subtract":
                left, right = (self.value(operand) for operand in instruction.operands)
                return _sum(left, right, 1 if instruction.opcode == "add" else -1)
            case "fusion" | "call":
                (called,) = self.module.called(instruction)
                return self.call(instruction, called).value(called.root.id, path)
            # After an inner loop, an outer loop can still count by an element that the inner loop
            # never changes.
            case "while":
                return _invariants(self, instruction)(0, path)
            case opcode if opcode in _SAME_VALUE:
                return self.value(instruction.operands[0], path)
            case _:
                return None


def _sum(left: Value, right: Value, sign: int) -> Value:
    if isinstance(right, int):
        if isinstance(left, int):
            return left + sign * right
        if isinstance(left, _Element):
            return _Element(left.path, left.offset + sign * right)
    elif isinstance(right, _Element) and isinstance(left, int) and sign == 1:
        return _Element(right.path, right.offset + left)
    return None


def _step(frame: ValueFrame, loop: Instruction, path: Path) -> int | None:
    """Return what one iteration adds to an element of the state, if that is a constant."""
    body, _ = frame.module.called(loop, 2)
    # The state is a symbol here, so that the result shows what one iteration adds to it.
    inside = ValueFrame(frame.module, body, lambda number, path: _Element(path))
    after = inside.value(body.root.id, path)
    return after.offset if isinstance(after, _Element) and after.path == path else None


def _invariants(frame: ValueFrame, loop: Instruction) -> Callable[[int, Path], Value]:
    """Return a function that looks up the elements of a loop's state that no iteration changes.

    It returns their value before the loop, and `None` for all other elements.
    """

    def argument(number: int, path: Path) -> Value:
        # Only elements that the body passes on unchanged have one value in all iterations.
        if number == 0 and path and _step(frame, loop, path) == 0:
            return frame.value(loop.operands[0], path)
        return None

    return argument


def loop_frames(frame: ValueFrame, loop: Instruction) -> tuple[ValueFrame, ValueFrame]:
    """Return the frames of a loop's body and of its condition."""
    body, condition = frame.module.called(loop, 2)
    invariants = _invariants(frame, loop)
    return (
        ValueFrame(frame.module, body, invariants),
        ValueFrame(frame.module, condition, invariants),
    )


def _turns_itself_off(frame: ValueFrame, loop: Instruction, flag: Value) -> bool:
    """Return whether a loop's condition is a flag in its state that the body sets to false.

    Such a loop runs at most once. `optimizer_update` and `transaction` are compiled to one, which
    the user has not written and should not be warned of.
    """
    if not isinstance(flag, _Element):
        return False
    body, _ = frame.module.called(loop, 2)
    inside = ValueFrame(frame.module, body, lambda number, path: _Element(path))
    return inside.value(body.root.id, flag.path) == 0


def trip_count(frame: ValueFrame, loop: Instruction) -> int | None:
    """Count the iterations of a `while`; `None` if the program does not say.

    Args:
        frame: The computation the loop is in.
        loop: The `while` instruction.
    """
    known = _KNOWN.search(loop.backend_config)
    if known:
        return int(known[1])
    _, condition = frame.module.called(loop, 2)
    inside = ValueFrame(frame.module, condition, lambda number, path: _Element(path))
    if _turns_itself_off(frame, loop, inside.value(condition.root.id)):
        return 1
    compared = _comparison(inside, condition.root)
    if compared is None:
        return None
    direction, left, right = compared
    # The bound may be carried in the state as well, and be a constant from before the loop.
    left, right = _settle(frame, loop, left), _settle(frame, loop, right)
    if isinstance(left, int) and isinstance(right, _Element):
        left, right, direction = right, left, _FLIPPED[direction]
    if not isinstance(left, _Element) or not isinstance(right, int):
        return None
    first, step = frame.value(loop.operands[0], left.path), _step(frame, loop, left.path)
    if not isinstance(first, int) or step is None:
        return None
    return _iterations(first + left.offset, step, direction, right)


def _comparison(frame: ValueFrame, instruction: Instruction) -> tuple[str, Value, Value] | None:
    """Return the comparison that a condition's root makes; `None` if it is not a comparison."""
    if instruction.opcode == "compare":
        left, right = (frame.value(operand) for operand in instruction.operands)
        return instruction.direction, left, right
    if instruction.opcode in ("fusion", "call"):
        (called,) = frame.module.called(instruction)
        return _comparison(frame.call(instruction, called), called.root)
    if instruction.opcode in _SAME_VALUE:
        return _comparison(frame, frame.computation.operand(instruction, 0))
    return None


def _settle(frame: ValueFrame, loop: Instruction, value: Value) -> Value:
    """Replace an element of the state that is constant throughout the loop by its number."""
    if isinstance(value, _Element) and _step(frame, loop, value.path) == 0:
        before = frame.value(loop.operands[0], value.path)
        return before + value.offset if isinstance(before, int) else None
    return value


def _iterations(first: int, step: int, direction: str, bound: int) -> int | None:
    """Count the iterations of `for (i = first; i <direction> bound; i += step)`.

    The result is `None` if the loop never ends.
    """
    holds = {
        "LT": operator.lt,
        "LE": operator.le,
        "GT": operator.gt,
        "GE": operator.ge,
        "NE": operator.ne,
        "EQ": operator.eq,
    }[direction]
    if not holds(first, bound):
        return 0
    # The comparison is true once, and false after the first change. Without a change the loop never
    # ends.
    if direction == "EQ":
        return 1 if step else None
    upward, downward = direction in ("LT", "LE"), direction in ("GT", "GE")
    if step == 0 or (upward and step < 0) or (downward and step > 0):
        return None
    if direction == "NE":
        count, rest = divmod(bound - first, step)
        return count if count > 0 and not rest else None
    return -(-(abs(bound - first) + (direction in ("LE", "GE"))) // abs(step))
