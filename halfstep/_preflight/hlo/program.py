"""Read an optimized HLO program: its computations, their instructions and what these do.

XLA's compilers write a program as a message `xla.HloModuleProto`. The field numbers below are those
of XLA's `hlo.proto` and `xla_data.proto`; a number is never given to another field. Fields that no
count depends on are not read, and a nested field is read on first use.
"""

# The errors here are about programs that XLA's compilers write: no user can cause or fix them.

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from halfstep._preflight.hlo.metadata import InstructionOrigin, StackTables, without_call
from halfstep._preflight.hlo.shapes import Array, Shape, Shapes, Tuple, leaves
from halfstep._preflight.hlo.wire import Message

ShapeIndex = tuple[int, ...]
"""The position of a value in a tuple; empty for a value that is not in a tuple."""

# Where a `LiteralProto` has numbers of a dtype: its field, and how bytes are unpacked.
_LITERALS: Mapping[str, tuple[int, str]] = MappingProxyType(
    {
        **{"bool": (2, ""), "int32": (4, ""), "int64": (5, ""), "uint32": (6, "")},
        **{"uint64": (7, ""), "float32": (8, "<f"), "float64": (9, "<d"), "uint8": (3, "B")},
        **{"int8": (15, "b"), "uint16": (16, "<H"), "int16": (17, "<h")},
    }
)


@dataclass(eq=False)
class Instruction:
    """One instruction.

    Attributes:
        id: Its number, which no other instruction of the program has.
        name: Its name in the text of the program.
        opcode: Such as `dot` or `all-gather-start`.
        base: The opcode without the `-start` of its asynchronous form.
        computation: The number of the computation that it is in.
        operands: The numbers of the instructions that it reads.
        called: The numbers of the computations that it calls.
    """

    id: int
    name: str
    opcode: str
    computation: int
    operands: tuple[int, ...]
    called: tuple[int, ...]
    _message: Message = field(repr=False)
    _shapes: Shapes = field(repr=False)
    _stacks: StackTables = field(repr=False)
    base: str = field(init=False, repr=False)

    # `base` is computed here and not on first use: it is read several times for every instruction.
    def __post_init__(self) -> None:
        self.base = self.opcode.removesuffix("-start")

    @property
    def shape_bytes(self) -> bytes:
        """The shape as it is written."""
        return self._message.raw(3)

    @cached_property
    def shape(self) -> Shape:
        """The shape of the value, a tuple for `-start` forms."""
        try:
            return self._shapes.read(self.shape_bytes)
        except ValueError as error:
            raise self.error(f"a shape that can be read ({error})") from None

    @cached_property
    def results(self) -> tuple[Array, ...]:
        """The arrays the operation produces; for a `-start` form without operands and context."""
        shape = self.shape
        if self.opcode.endswith("-start") and isinstance(shape, Tuple):
            # copy-start is (destination, source, context), and the others are (operands, results,
            # context...). all-reduce-start was only the results before the XLA of JAX 0.12, which
            # writes the operands as a tuple even if there is only one.
            parts = shape.elements
            alone = self.opcode == "all-reduce-start" and not any(
                isinstance(part, Tuple) for part in parts
            )
            if self.opcode == "copy-start" and parts:
                shape = parts[0]
            elif not alone:
                if len(parts) < 2:
                    raise self.error(f"operands and results in its shape, not {shape}")
                shape = parts[1]
        return tuple(leaves(shape))

    def array(self, index: ShapeIndex) -> str:
        """Return the dtype and shape of its value at an index, `bfloat16[8,1024]`, or nothing."""
        shape = self.shape
        for position in index:
            if not isinstance(shape, Tuple) or position >= len(shape.elements):
                return ""
            shape = shape.elements[position]
        return str(shape) if isinstance(shape, Array) and shape.bits else ""

    @cached_property
    def op_name(self) -> str:
        """JAX's name of the operation, with its scopes."""
        return self._message.message(7).text(2)

    @cached_property
    def source(self) -> str:
        """The user's line, `train.py:12`; empty if the program does not say."""
        metadata = self._message.message(7)
        return self._stacks.source(metadata.text(3), metadata.integer(4), metadata.integer(15))

    @property
    def origin(self) -> InstructionOrigin:
        """Its scopes, operation and line."""
        return InstructionOrigin(without_call(self.op_name), self.source)

    @property
    def parameter(self) -> int:
        """For a `parameter`, which one it is."""
        return self._message.integer(9)

    @property
    def element(self) -> int:
        """For a `get-tuple-element`, which element it takes."""
        return self._message.integer(13)

    @property
    def target(self) -> str:
        """For a `custom-call`, the name of the function that it calls."""
        name = self._message.text(28)
        if not name:
            raise self.error("a `custom_call_target`")
        return name

    @property
    def direction(self) -> str:
        """For a `compare`, how: `LT`, `GE` ..."""
        return self._message.text(63)

    @property
    def backend_config(self) -> str:
        """What the compiler noted for itself, JSON for most instructions."""
        return self._message.text(43)

    @property
    def slice_sizes(self) -> tuple[int, ...]:
        """For a `collective-permute` in place, the sizes of its slices one after the other."""
        return self._message.integers(20)

    @property
    def dot_dimensions(self) -> Message:
        """For a dot, `DotDimensionNumbers`: contracting dimensions are 1 and 2, batch 3 and 4."""
        ragged = self._message.message(90).message(1)
        return ragged if self.opcode == "ragged-dot" else self._message.message(30)

    @property
    def ragged_dimensions(self) -> tuple[int, ...]:
        """For a `ragged-dot`, the dimensions of the left operand that the groups split."""
        return self._message.message(90).integers(2)

    @property
    def convolution_dimensions(self) -> Message | None:
        """For a convolution, `ConvolutionDimensionNumbers`."""
        return self._message.message(16) if self._message.has(16) else None

    @property
    def window(self) -> tuple[Message, ...]:
        """For a convolution, a `WindowDimension` for each spatial dimension."""
        return tuple(self._message.message(15).messages(1))

    @property
    def is_host_transfer(self) -> bool:
        """Whether a `send` or `recv` is between a device and its host."""
        return bool(self._message.integer(47))

    @property
    def on_host(self) -> bool:
        """Whether the host computes what it calls."""
        attributes = {each.text(1): each.text(2) for each in self._message.message(68).messages(1)}
        return self._message.text(79) == "host" or attributes.get("_xla_compute_type") == "host"

    @cached_property
    def number(self) -> int | None:
        """For a `constant`, its value if it is one whole number; `None` for all others."""
        if not isinstance(self.shape, Array) or self.shape.dims:
            return None
        at, kind = _LITERALS.get(self.shape.dtype, (0, ""))
        literal = self._message.message(8)
        if not kind:
            return next(iter(literal.integers(at)), None)
        data = literal.raw(at)
        if len(data) != struct.calcsize(kind):
            return None
        (value,) = struct.unpack(kind, data)
        return int(value) if math.isfinite(value) and value == int(value) else None

    def error(self, expected: str) -> ValueError:
        """Create an error that names the instruction."""
        return ValueError(
            f"the instruction `{self.name}` (`{self.opcode}`) of the optimized program cannot be "
            f"counted: expected {expected}. The program may be of a compiler whose format is not "
            "known here; please report it with the instruction's line in `entry.hlo`."
        )


@dataclass(eq=False)
class Computation:
    """A computation: its instructions by number, operands before their users, and its root."""

    id: int
    name: str
    instructions: Mapping[int, Instruction]
    root: Instruction

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def __getitem__(self, number: int) -> Instruction:
        return self.instructions[number]

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        """Return the instruction that is an operand of another."""
        if index >= len(instruction.operands):
            raise instruction.error(f"{index + 1} operands or more")
        return self[instruction.operands[index]]

    def shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Return the shapes of an instruction's operands."""
        return tuple(self[operand].shape for operand in instruction.operands)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {i.parameter: i for i in self if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[int, list[tuple[Instruction, int]]]:
        """The users of each instruction, and as which operand they use it."""
        found = {number: list[tuple[Instruction, int]]() for number in self.instructions}
        for instruction in self:
            for index, operand in enumerate(instruction.operands):
                found[operand].append((instruction, index))
        return found


@dataclass(eq=False)
class Module:
    """A program: its computations and instructions by number, and the computation that runs."""

    computations: Mapping[int, Computation]
    instructions: Mapping[int, Instruction]
    entry: Computation

    @cached_property
    def given(self) -> dict[int, Instruction]:
        """The operand that each parameter of an asynchronous call stands for."""
        return {
            parameter.id: self.instructions[start.operands[number]]
            for start in self.instructions.values()
            if start.opcode == "async-start"
            for called in self.called(start)
            for number, parameter in called.parameters.items()
            if number < len(start.operands)
        }

    def called(self, instruction: Instruction, count: int = 1) -> tuple[Computation, ...]:
        """Return the computations that an instruction calls; raise if there are not so many.

        Args:
            instruction: Any instruction. A loop calls its body and its condition, a conditional its
                branches, the others one computation.
            count: The number of computations; 0 for one or more.
        """
        found = tuple(self.computations[number] for number in instruction.called)
        if len(found) != (count or max(1, len(found))):
            raise instruction.error(f"{count or 'some'} computations that it calls")
        return found


def read_module(data: bytes) -> Module:
    """Read a program.

    Args:
        data: A message `xla.HloModuleProto`.

    Raises:
        ValueError: If the bytes are not such a message, or the program is not a whole one.
    """
    module = Message(data)
    computations: dict[int, Computation] = {}
    instructions: dict[int, Instruction] = {}
    stacks = StackTables(module.message(17))
    shapes = Shapes()
    for message in module.messages(3):
        _add(message, computations, instructions, shapes, stacks)
    entry = computations.get(module.integer(6))
    if entry is None:
        raise ValueError(
            "expected a compiled program with an entry computation, a whole `HloModuleProto`; got "
            f"{len(data)} bytes with {len(computations)} computations and without the entry."
        )
    return Module(computations, instructions, entry)


def _add(
    message: Message,
    computations: dict[int, Computation],
    instructions: dict[int, Instruction],
    shapes: Shapes,
    stacks: StackTables,
) -> None:
    """Add a computation. It uses only what was read before, so that no walk can go in circles."""
    computation, name, own = message.integer(5), message.text(1), dict[int, Instruction]()
    for each in message.messages(2):
        made = Instruction(
            id=each.integer(35),
            name=each.text(1),
            opcode=each.text(2),
            computation=computation,
            operands=each.integers(36),
            called=each.integers(38),
            _message=each,
            _shapes=shapes,
            _stacks=stacks,
        )
        where = f"the instruction `{made.name}` of the computation `{name}`"
        if made.id in instructions:
            raise ValueError(f"{where} has the number {made.id} of another instruction.")
        if not own.keys() >= set(made.operands):
            raise ValueError(f"{where} uses an instruction that is not before it.")
        if not computations.keys() >= set(made.called):
            raise ValueError(f"{where} calls a computation that is not before its own.")
        own[made.id] = instructions[made.id] = made
        shapes.every.append(made.shape_bytes)
    root = own.get(message.integer(6))
    if root is None or computation in computations:
        raise ValueError(f"the computation `{name}` has no root, or the number of another one.")
    computations[computation] = Computation(computation, name, own, root)
