"""Count the bytes that a program sends between devices."""

import math
from collections import Counter

from halfstep._preflight.hlo.program import Computation, Instruction
from halfstep._preflight.hlo.shapes import Array, leaves

KINDS = frozenset(
    (
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "recv",
        "reduce-scatter",
        "send",
    )
)

# XLA:TPU keeps the flags of a collective that is under way in this memory space.
_FLAGS = 2


def payload(
    computation: Computation, instruction: Instruction, *, fused: bool
) -> dict[tuple[str, str], int]:
    """Count the bytes that a collective moves per device, by kind and dtype.

    The payload is the larger of input and output: for an all-gather the gathered array, for a
    reduce-scatter the array before it is scattered. A send to the host or a recv from it has no
    payload.

    Args:
        computation: The computation that the instruction is in.
        instruction: Any instruction; only collectives have a payload.
        fused: Whether the computation belongs to a fusion.
    """
    kind = instruction.base
    # XLA:TPU repeats a collective in every fusion that overlaps with it; it is sent once.
    if kind not in KINDS or (fused and _on_the_way(computation, instruction)):
        return {}
    operands = [tuple(leaves(shape)) for shape in computation.shapes(instruction)]
    results = instruction.results
    if kind in ("send", "recv"):
        if instruction.is_host_transfer:
            return {}
        # (data, context, token); the data of a send is its first operand.
        moved = operands[0] if kind == "send" else results[:1]
        return _by_dtype(kind, moved, ())
    if kind == "ragged-all-to-all":
        # The other operands are offsets and sizes.
        return _by_dtype(kind, operands[0], results)
    if kind == "collective-permute" and instruction.slice_sizes:
        # In place: (from, to, where from, where to), and only slices move.
        source, sizes = operands[0][0], instruction.slice_sizes
        rank = max(1, len(source.dims))
        elements = sum(math.prod(sizes[at : at + rank]) for at in range(0, len(sizes), rank))
        return {(kind, source.dtype): source.bytes_of(elements)}
    if kind == "all-reduce" and fused and _is_scattered(computation, instruction):
        kind = "reduce-scatter"
    return _by_dtype(kind, tuple(array for group in operands for array in group), results)


def _by_dtype(
    kind: str, operands: tuple[Array, ...], results: tuple[Array, ...]
) -> dict[tuple[str, str], int]:
    sums = (Counter[str](), Counter[str]())
    for total, arrays in zip(sums, (operands, results), strict=True):
        for array in arrays:
            total[array.dtype] += array.bytes
    # The union of two counters keeps the larger count of each key, which is the payload.
    return {(kind, dtype): size for dtype, size in (sums[0] | sums[1]).items() if size}


def is_continuation(computation: Computation) -> bool:
    """Return whether a fused computation continues a collective that another one started.

    XLA:TPU spreads a collective over several fusions: one starts it, some compute during it, one
    ends it. Each fusion contains the same collective; those after the first receive its flags.
    """
    return any(
        isinstance(parameter.shape, Array) and parameter.shape.space == _FLAGS
        for parameter in computation.parameters.values()
    )


def _on_the_way(computation: Computation, instruction: Instruction) -> bool:
    return is_continuation(computation) and not any(
        user.opcode == "custom-call" and user.target == "AsyncCollectiveStart"
        for user, _ in computation.users[instruction.id]
    )


def _is_scattered(computation: Computation, instruction: Instruction) -> bool:
    """Return whether a fused all-reduce keeps a slice only: XLA:TPU's form of a reduce-scatter."""
    root = computation.root
    users = computation.users[instruction.id]
    return (
        root.opcode == "dynamic-slice"
        and [user.id for user, index in users if index == 0] == [root.id]
        and len(users) == 1
    )
