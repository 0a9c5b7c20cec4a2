"""Find which values lie in a device's memory at its peak use."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halfstep._preflight.hlo.buffer_assignment import (
    Allocation,
    BufferAssignment,
    Event,
    Kind,
    Value,
)

# Both compilers put buffers of the host into this memory space.
_HOST = 5


@dataclass(frozen=True, slots=True)
class LiveBuffer:
    """Memory that is in use at the peak, and the values in it.

    Attributes:
        kind: The kind of the allocation that it is in.
        bytes: Its size.
        values: The values in it at the peak. Several if one is updated in the place of another.
        parameter: For an argument, which parameter of the program it is.
    """

    kind: Kind
    bytes: int
    values: tuple[Value, ...]
    parameter: int


@dataclass(frozen=True, slots=True)
class LiveBuffers:
    """The contents of a device's memory at the peak.

    Attributes:
        buffers: The buffers.
        gaps: Bytes of the allocations for temporaries that are empty at that time. The compiler
            places values of other times there, and aligns them.
        at: The instruction at which the largest allocation for temporaries is fullest; empty if
            there are no temporaries.
    """

    buffers: tuple[LiveBuffer, ...]
    gaps: int
    at: str

    @property
    def bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.bytes for buffer in self.buffers)


def live_buffers(assignment: BufferAssignment, *, on_tpu: bool) -> LiveBuffers:
    """Find which buffers lie in a device's memory at the peak.

    Arguments, outputs and constants are there from beginning to end: the runtime allocates them
    before it starts the program. Temporaries come and go inside one allocation (rarely two). The
    peak is the moment when the live temporaries have the most bytes, as in XLA's own figure.

    Args:
        assignment: The compiler's buffer assignment.
        on_tpu: Whether the assignment is by XLA:TPU, for which only memory space 0 is the device's
            main memory. On a GPU, every space except the host's is main memory.
    """
    found: list[LiveBuffer] = []
    gaps, fullest, at = 0, 0, ""
    for allocation in assignment.allocations.values():
        if allocation.color if on_tpu else allocation.color == _HOST:
            continue
        if allocation.kind == "thread-local":
            continue
        if allocation.kind != "temporary":
            found.append(_lasting(assignment, allocation))
            continue
        groups, instruction = _fullest(assignment, assignment.traces.get(allocation.number, ()))
        live = [
            LiveBuffer("temporary", _size(values), tuple(values), 0) for values in groups if values
        ]
        taken = sum(buffer.bytes for buffer in live)
        gaps += max(0, allocation.bytes - taken)
        found += live
        if taken > fullest:
            fullest, at = taken, instruction
    return LiveBuffers(tuple(sorted(found, key=lambda one: -one.bytes)), gaps, at)


def _lasting(assignment: BufferAssignment, allocation: Allocation) -> LiveBuffer:
    """Return the buffer of an argument, an output or a constant, without values of other times."""
    values = [assignment.values[number] for number in allocation.values]
    if allocation.kind == "output":
        # The last value is the one that is returned: earlier values only use its place.
        values = values[-1:]
    return LiveBuffer(allocation.kind, allocation.bytes, tuple(values), allocation.parameter)


def _size(values: Iterable[Value]) -> int:
    return max(value.bytes for value in values)


def _fullest(
    assignment: BufferAssignment, events: Sequence[Event]
) -> tuple[list[list[Value]], str]:
    """Find the live values when they have the most bytes, grouped by place, and the instruction."""
    # The first pass only counts the live bytes. The second pass, up to the peak, collects the
    # values: keeping the set of every new maximum would take quadratic time.
    most, when = 0, -1
    for step, taken in enumerate(_bytes_after_each(assignment, events)):
        if taken > most:
            most, when = taken, step
    if when < 0:
        return [], ""
    live: dict[int, list[int]] = defaultdict(list)
    place: dict[int, int] = {}
    for event in events[: when + 1]:
        _apply(event, live, place)
    groups = [[assignment.values[number] for number in numbers] for numbers in live.values()]
    return groups, events[when].instruction


def _bytes_after_each(assignment: BufferAssignment, events: Sequence[Event]) -> Iterable[int]:
    live: dict[int, list[int]] = defaultdict(list)
    place: dict[int, int] = {}
    taken = 0
    for event in events:
        at = place.get(event.other, event.other) if event.kind == "share" else event.value
        at = place.get(at, at) if event.kind == "end" else at
        before = _size(assignment.values[n] for n in live[at]) if live[at] else 0
        _apply(event, live, place)
        after = _size(assignment.values[n] for n in live[at]) if live[at] else 0
        taken += after - before
        yield taken


def _apply(event: Event, live: dict[int, list[int]], place: dict[int, int]) -> None:
    """Note that a value begins or ends. A place is named by the first value that lay there."""
    if event.kind == "begin":
        place[event.value] = event.value
        live[event.value].append(event.value)
    elif event.kind == "share":
        place[event.value] = place.get(event.other, event.other)
        live[place[event.value]].append(event.value)
    elif event.value in place and event.value in live[place[event.value]]:
        live[place[event.value]].remove(event.value)
