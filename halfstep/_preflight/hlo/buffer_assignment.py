"""Decode XLA's buffer assignment: which value of a program lies where in memory, and until when.

The compilers for GPUs and TPUs write the assignment, together with its program, as one message
`xla.HloProto` when they are asked for a dump (`--xla_dump_to`, `--xla_dump_hlo_as_proto`). The
field numbers below are those of XLA's `hlo.proto` and `xla_data.proto`. A number is never given to
another field.
"""

import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from halfstep._preflight.hlo.metadata import StackTables
from halfstep._preflight.hlo.wire import Message

ShapeIndex = tuple[int, ...]
"""The position of a value in a tuple; empty for a value that is not in a tuple."""

Kind = Literal["argument", "output", "constant", "thread-local", "temporary"]

# `xla.PrimitiveType`, by the names that NumPy or ml_dtypes gives its members.
DTYPES: Mapping[int, str] = types.MappingProxyType(
    {
        1: "bool",
        **dict(zip(range(2, 6), ("int8", "int16", "int32", "int64"), strict=True)),
        **dict(zip(range(6, 10), ("uint8", "uint16", "uint32", "uint64"), strict=True)),
        **{10: "float16", 11: "float32", 12: "float64", 15: "complex64", 16: "bfloat16"},
        **{18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn", 21: "int4", 22: "uint4"},
        **{23: "float8_e4m3b11fnuz", 24: "float8_e5m2fnuz", 25: "float8_e4m3fnuz", 26: "int2"},
        **{27: "uint2", 28: "float8_e4m3", 29: "float8_e3m4", 30: "int1", 31: "uint1"},
        **{32: "float4_e2m1fn", 33: "float8_e8m0fnu"},
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class HloNode:
    """One instruction of the program.

    Attributes:
        id: Its number.
        name: Its name in the text of the program.
        opcode: Such as `fusion` or `while`.
        computation: The number of the computation that it is in.
        operands: The numbers of the instructions that it reads.
        called: The numbers of the computations that it calls.
        parameter: For a `parameter`, which one it is.
        element: For a `get-tuple-element`, which element it takes.
        op_name: JAX's name of the operation, with its scopes.
        source: The user's line, `train.py:12`; empty if the program does not say.
    """

    id: int
    name: str
    opcode: str
    computation: int
    operands: tuple[int, ...]
    called: tuple[int, ...]
    parameter: int
    element: int
    op_name: str
    source: str
    _shape: bytes = field(repr=False)

    def array(self, index: ShapeIndex) -> str:
        """Return the dtype and shape of its value at an index: `bfloat16[8,1024]`."""
        shape = Message(self._shape)
        for position in index:
            elements = list(shape.messages(4))
            if position >= len(elements):
                return ""
            shape = elements[position]
        dtype = DTYPES.get(shape.integer(2))
        return f"{dtype}[{','.join(map(str, shape.integers(3)))}]" if dtype else ""


@dataclass(frozen=True, slots=True, eq=False)
class HloGraph:
    """The program: instructions by number, and the root and the parameters of each computation."""

    nodes: Mapping[int, HloNode]
    members: Mapping[int, tuple[HloNode, ...]]
    roots: Mapping[int, int]
    entry: int


@dataclass(frozen=True, slots=True)
class Value:
    """A value that has memory of its own: where it is defined, its bytes, and in which memory.

    Attributes:
        node: The number of the instruction that defines it.
        index: Where in that instruction's result it is.
        bytes: Its size, with the padding of its layout.
        color: The memory space: 0 is the device's memory.
    """

    node: int
    index: ShapeIndex
    bytes: int
    color: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A range of memory that is reserved while the program runs.

    Attributes:
        number: Its number.
        bytes: Its size.
        color: The memory space.
        kind: Its purpose.
        parameter: For an argument, which parameter of the program it is.
        values: The numbers of the values that lie in it, at one time or another.
        is_tuple: Whether it holds the table of a tuple's addresses and no data.
    """

    number: int
    bytes: int
    color: int
    kind: Kind
    parameter: int
    values: tuple[int, ...]
    is_tuple: bool


@dataclass(frozen=True, slots=True)
class Event:
    """A value begins to be live (alone, or in the place of another one) or ends.

    Attributes:
        kind: `begin`, `end`, or `share`: begin in the place of `other`.
        value: The number of the value.
        other: The value whose place it shares, if any.
        instruction: The name of the instruction at which the event happens.
    """

    kind: Literal["begin", "end", "share"]
    value: int
    other: int
    instruction: str


@dataclass(frozen=True, slots=True, eq=False)
class BufferAssignment:
    """A program and where its values lie."""

    graph: HloGraph
    values: Mapping[int, Value]
    allocations: Mapping[int, Allocation]
    traces: Mapping[int, tuple[Event, ...]]
    """The events in each allocation, by its number, in the order of the schedule."""


def decode(data: bytes) -> BufferAssignment:
    """Decode a file that XLA dumped.

    Raises:
        ValueError: If `data` is not such a file, or has no buffer assignment.
    """
    whole = Message(data)
    if not whole.has(1) or not whole.has(3):
        raise ValueError("the compiler's file has no program with a buffer assignment in it")
    assignment = whole.message(3)
    values = {message.integer(1): _value(message) for message in assignment.messages(1)}
    allocations = [_allocation(message) for message in assignment.messages(3)]
    # XLA:TPU renumbers its allocations after it has written their numbers into the traces. So a
    # trace is assigned to the allocation that its values lie in.
    places = {value: one.number for one in allocations for value in one.values}
    traces: dict[int, tuple[Event, ...]] = {}
    for message in assignment.messages(4):
        events = tuple(_event(event) for event in message.messages(1))
        if events and events[0].value in places:
            traces[places[events[0].value]] = events
    graph = _graph(whole.message(1))
    missing = {value.node for value in values.values()} - graph.nodes.keys()
    if missing:
        raise ValueError(f"values are defined by {len(missing)} instructions that are not there")
    return BufferAssignment(graph, values, {one.number: one for one in allocations}, traces)


def _value(message: Message) -> Value:
    location = message.message(3)
    return Value(location.integer(4), location.integers(3), message.integer(2), message.integer(4))


def _allocation(message: Message) -> Allocation:
    kind: Kind = "temporary"
    if message.integer(3):
        kind = "thread-local"
    elif message.integer(5):
        kind = "argument"
    elif message.integer(12):
        kind = "constant"
    elif message.integer(7):
        kind = "output"
    return Allocation(
        number=message.integer(1),
        bytes=message.integer(2),
        color=message.integer(8),
        kind=kind,
        parameter=message.integer(6),
        values=tuple(assigned.integer(1) for assigned in message.messages(9)),
        is_tuple=bool(message.integer(11)),
    )


def _event(message: Message) -> Event:
    kinds: tuple[Literal["begin", "end", "share"], ...] = ("begin", "end", "share")
    kind = message.integer(1)
    if kind >= len(kinds):
        raise ValueError(f"an event of the heap is of the unknown kind {kind}")
    return Event(kinds[kind], message.integer(2), message.integer(5), message.text(4))


def _graph(module: Message) -> HloGraph:
    stacks = _stacks(module.message(17))
    members: dict[int, tuple[HloNode, ...]] = {}
    roots: dict[int, int] = {}
    for computation in module.messages(3):
        number = computation.integer(5)
        roots[number] = computation.integer(6)
        members[number] = tuple(
            _node(message, number, stacks) for message in computation.messages(2)
        )
    nodes = {node.id: node for nodes in members.values() for node in nodes}
    return HloGraph(nodes, members, roots, module.integer(6))


def _node(message: Message, computation: int, stacks: StackTables) -> HloNode:
    metadata = message.message(7)
    return HloNode(
        id=message.integer(35),
        name=message.text(1),
        opcode=message.text(2),
        computation=computation,
        operands=message.integers(36),
        called=message.integers(38),
        parameter=message.integer(9),
        element=message.integer(13),
        op_name=metadata.text(2),
        source=stacks.source(metadata.text(3), metadata.integer(4), metadata.integer(15)),
        _shape=message.raw(3),
    )


def _stacks(index: Message) -> StackTables:
    names = ("file_name_id", "function_name_id", "line")
    return StackTables(
        files=dict(enumerate(index.texts(1), start=1)),
        functions=dict(enumerate(index.texts(2), start=1)),
        locations={
            number: {name: message.integer(at) for at, name in enumerate(names, start=1)}
            for number, message in enumerate(index.messages(3), start=1)
        },
        frames={
            number: {
                "file_location_id": message.integer(1),
                "parent_frame_id": message.integer(2),
            }
            for number, message in enumerate(index.messages(4), start=1)
        },
    )
