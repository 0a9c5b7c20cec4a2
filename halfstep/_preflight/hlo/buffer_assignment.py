"""Decode XLA's buffer assignment: which value of a program lies where in memory, and until when.

The compilers for GPUs and TPUs write the assignment, together with its program, as one message
`xla.HloProto` when they are asked for a dump (`--xla_dump_to`, `--xla_dump_hlo_as_proto`). The
field numbers below are those of XLA's `hlo.proto`. A number is never given to another field.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from halfstep._preflight.hlo.program import Module, ShapeIndex, read_module
from halfstep._preflight.hlo.wire import Message

Kind = Literal["argument", "output", "constant", "thread-local", "temporary"]


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

    module: Module
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
    module = read_module(whole.raw(1))
    missing = {value.node for value in values.values()} - module.instructions.keys()
    if missing:
        raise ValueError(f"values are defined by {len(missing)} instructions that are not there")
    return BufferAssignment(module, values, {one.number: one for one in allocations}, traces)


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
