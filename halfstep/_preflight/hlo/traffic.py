"""Count the bytes that kernels read from and write to the device's memory.

A kernel reads each distinct buffer once and writes each result once, except for elements that it
does not touch. A slice or gather reads the elements it takes, also when it is fused and the operand
reaches it through element-wise operations only. A dynamic-update-slice or scatter writes the
elements it replaces, in place, and the rest of its operand is neither read nor written. Arrays that
live on chip or on the host do not count, nor do the workspaces that library calls return. Bytes are
logical: elements times item size, without the padding of a tiled layout.
"""

# The errors here are about programs that XLA's compilers write: no user can cause or fix them.

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from halfstep._preflight.hlo.collectives import KINDS, is_continuation
from halfstep._preflight.hlo.contraction_flops import ANNOTATIONS
from halfstep._preflight.hlo.program import Computation, Instruction, Module
from halfstep._preflight.hlo.shapes import Array, leaves

# Instructions that only name, group or wait for values; loops and calls have kernels inside.
_FREE = re.compile(
    r"add-dependency|after-all|async|bitcast|call|conditional|constant|domain|get-dimension-size"
    r"|get-tuple-element|opt-barrier|optimization-barrier|parameter|partition-id|replica-id"
    r"|set-dimension-size|tuple|while|.*-done|.*-update"
)
# These calls return their scratch memory as a last result, as bytes; nobody reads it.
_WITH_WORKSPACE = re.compile(r"__(cublas|cudnn)\$.*")
_SLICES = re.compile(r"dynamic-slice|gather|slice")
# Through these operations, a fusion reads only the elements that later operations need: if a slice
# takes one row of a sum of two arrays, one row of each is read.
_ELEMENTWISE = re.compile(
    r"abs|add|and|atan2|bitcast|bitcast-convert|cbrt|ceil|clamp|compare|complex|convert|copy|cosine"
    r"|count-leading-zeros|divide|erf|exponential|exponential-minus-one|floor|imag|is-finite|log"
    r"|log-plus-one|logistic|maximum|minimum|multiply|negate|not|or|popcnt|power|real"
    r"|reduce-precision|remainder|reshape|reverse|round-nearest-(afz|even)|rsqrt|select|shift-left"
    r"|shift-right-(arithmetic|logical)|sign|sine|sqrt|subtract|tan|tanh|transpose|xor"
)


@dataclass(frozen=True)
class Kernel:
    """Kernels of a program that move the same number of bytes.

    Attributes:
        read: Bytes that one of them reads from the device's memory.
        written: Bytes that one of them writes to it.
        count: How often such a kernel runs in a step, iterations of loops included.
    """

    read: int
    written: int
    count: int


def memory_floor_bytes(kernels: Iterable[Kernel], cache_bytes: int) -> int:
    """Compute a lower bound on the bytes that cross the device's memory interface.

    Before a kernel runs, at most a full cache of its inputs can already be in the cache. After it,
    at most a full cache of its results can stay there. The rest must cross.

    Args:
        kernels: The kernels of a step.
        cache_bytes: The size of the cache between the kernels and the memory; 0 for none.

    Returns:
        The sum over kernels of `max(0, read - cache) + max(0, written - cache)`, times the count.
    """
    return sum(
        (max(0, kernel.read - cache_bytes) + max(0, kernel.written - cache_bytes)) * kernel.count
        for kernel in kernels
    )


def moved(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[int, Counter[str]] | None:
    """Count the bytes an instruction reads, and writes by dtype; `None` if it is not a kernel.

    Args:
        module: The program.
        computation: The computation the instruction is in, which does not belong to a fusion.
        instruction: Any instruction.
    """
    base = instruction.base
    if _FREE.fullmatch(base):
        return None
    if base == "fusion":
        return _fusion(module, computation, instruction)
    results = instruction.results
    if base == "custom-call":
        target = instruction.target
        if ANNOTATIONS.fullmatch(target):
            return None
        if _WITH_WORKSPACE.fullmatch(target) and len(results) > 1 and _is_workspace(results[-1]):
            results = results[:-1]
    # A recv has no operand but a token, and the data is its first result.
    if base == "recv":
        return 0, _by_dtype((array, array.size) for array in results[:1])
    read = _read(
        module,
        computation,
        instruction,
        lambda index, array: _taken(computation, instruction, index, array.size),
    )
    if base == "send":
        return read, Counter()
    replaced = _replaced(computation, instruction)
    if replaced is not None:
        return read, _by_dtype((result, replaced) for result in results)
    return read, _by_dtype((result, result.size) for result in results)


def _read(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    touched: Callable[[int, Array], int],
) -> int:
    """Count the bytes read from all operands, and from each buffer at most its size."""
    # A buffer may be an operand twice. Two slices of it are both read, but no more than all of it.
    parts, limits = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for index, operand in enumerate(instruction.operands):
        arrays = tuple(leaves(computation[operand].shape))
        buffer = _buffer(module, computation[operand])
        parts[buffer] += sum(_part(array, touched(index, array)) for array in arrays)
        limits[buffer] = max(limits[buffer], _bytes(arrays))
    return sum(min(size, limits[buffer]) for buffer, size in parts.items())


def _buffer(module: Module, value: Instruction) -> tuple[int, int]:
    """Return a key of a value's buffer, the same whatever names the value goes by."""
    while value.opcode == "bitcast" or value.id in module.given:
        value = module.given.get(value.id) or module.instructions[value.operands[0]]
    if value.opcode == "get-tuple-element":
        return value.operands[0], value.element
    return value.id, -1


def _is_workspace(array: Array) -> bool:
    return array.dtype in ("int8", "uint8") and len(array.dims) == 1


def _bytes(arrays: Iterable[Array]) -> int:
    return sum(array.bytes for array in arrays if array.in_memory)


def _by_dtype(parts: Iterable[tuple[Array, int]]) -> Counter[str]:
    """Count the bytes of some elements of arrays, by dtype."""
    total = Counter[str]()
    for array, elements in parts:
        total[array.dtype] += _part(array, elements)
    return total


def _part(array: Array, elements: int) -> int:
    """Count the bytes of some of an array's elements."""
    return array.bytes_of(min(elements, array.size)) if array.in_memory else 0


def _updates(instruction: Instruction) -> range:
    """Return which operands of a dynamic-update-slice or scatter are updated."""
    if instruction.base == "dynamic-update-slice":
        return range(1)
    return (
        range((len(instruction.operands) - 1) // 2) if instruction.base == "scatter" else range(0)
    )


def _replaced(computation: Computation, instruction: Instruction) -> int | None:
    """Count the elements of each result that an in-place update replaces."""
    arrays = _updates(instruction)
    if not arrays:
        return None
    update = 1 if instruction.base == "dynamic-update-slice" else len(arrays) + 1
    shape = computation.operand(instruction, update).shape
    return sum(array.size for array in leaves(shape))


def _taken(computation: Computation, user: Instruction, index: int, size: int) -> int:
    """Count the elements of an operand that an instruction outside a fusion touches."""
    if _SLICES.fullmatch(user.base) and index == 0:
        return min(size, sum(result.size for result in user.results))
    if index in _updates(user):
        # A scatter combines with the old elements; a dynamic-update-slice replaces them.
        return (_replaced(computation, user) or 0) if user.base == "scatter" else 0
    return size


def _fusion(
    module: Module, computation: Computation, fusion: Instruction
) -> tuple[int, Counter[str]]:
    (called,) = module.called(fusion)
    inside = _Inside(module, called)
    read = _read(
        module,
        computation,
        fusion,
        lambda index, array: inside.touched[_parameter(called, fusion, index).id],
    )
    root, outputs = called.root, fusion.results
    if _calls(root, "AsyncCollectiveStart"):
        # (the operand as it is, the buffer to fill, flags...)
        return read, _by_dtype((output, output.size) for output in outputs[1:])
    made = root.operands if root.opcode == "tuple" else (root.id,)
    # Results that cannot be matched with those of the root count in full.
    if len(made) != len(outputs):
        return read, _by_dtype((output, output.size) for output in outputs)
    return read, _by_dtype(
        (output, inside.written(number)) for output, number in zip(outputs, made, strict=True)
    )


def _parameter(computation: Computation, fusion: Instruction, index: int) -> Instruction:
    """Return the parameter of a fused computation that an operand of the fusion becomes."""
    if index not in computation.parameters:
        raise fusion.error(f"a parameter({index}) in the computation it calls")
    return computation.parameters[index]


def _calls(instruction: Instruction, target: str) -> bool:
    return instruction.opcode == "custom-call" and instruction.target == target


def _size(instruction: Instruction) -> int:
    return sum(array.size for array in leaves(instruction.shape))


class _Inside:
    """The elements that a fused computation touches.

    Args:
        module: The program.
        computation: The fused computation.
        wanted: For a fusion within a fusion, how many elements of its result are needed.

    Attributes:
        touched: How many elements of each of its values are needed.
    """

    def __init__(self, module: Module, computation: Computation, wanted: int | None = None):
        self.module = module
        self.computation = computation
        self.nested = wanted is not None
        self.continues = is_continuation(computation)
        self.touched: dict[int, int] = {}
        root = computation.root
        # Users come after the values that they use.
        for instruction in reversed(tuple(computation)):
            needed = sum(
                self._needed(instruction, user, index)
                for user, index in computation.users[instruction.id]
            )
            if instruction is root:
                handed_on = instruction.opcode == "parameter" and wanted is None
                needed = 0 if handed_on else (_size(root) if wanted is None else wanted)
            self.touched[instruction.id] = min(_size(instruction), needed)

    def written(self, number: int) -> int:
        """Count the elements of a result that are written."""
        source = self._source(number)
        if source.opcode == "parameter" or _calls(source, "AsyncCollectiveDone"):
            return 0
        if self.continues and source.base in KINDS:
            return 0
        if self._in_place(source):
            # Consecutive updates write into one buffer: each adds the elements that it replaces,
            # down to the parameter.
            replaced = _replaced(self.computation, source) or 0
            return replaced + self.written(source.operands[0])
        return 0 if self._is_library_workspace(source) else _size(source)

    def _needed(self, value: Instruction, user: Instruction, index: int) -> int:
        """Count the elements of a value that one of its users needs."""
        size = _size(value)
        if user.opcode == "tuple" and user is self.computation.root:
            # A parameter is passed on unchanged; everything else is written.
            return 0 if self._source(value.id).opcode == "parameter" else size
        if _calls(user, "AsyncCollectiveDone") or (self.continues and user.base in KINDS):
            return 0
        if _SLICES.fullmatch(user.base) and index == 0:
            return self.touched[user.id]
        if index in _updates(user) and self._in_place(user) and self._is_result(user):
            return _taken(self.computation, user, index, size)
        if _ELEMENTWISE.fullmatch(user.opcode) and _size(user) == size:
            return self.touched[user.id]
        if user.opcode == "fusion":
            (called,) = self.module.called(user)
            inside = _Inside(self.module, called, self.touched[user.id])
            return inside.touched[_parameter(called, user, index).id]
        return size

    def _source(self, number: int) -> Instruction:
        """Return the instruction that computes a value, behind the bitcasts that rename it."""
        instruction = self.computation[number]
        while instruction.opcode == "bitcast":
            instruction = self.computation.operand(instruction, 0)
        return instruction

    def _in_place(self, update: Instruction) -> bool:
        """Return whether an update changes a parameter in place."""
        if not _updates(update):
            return False
        target = self._source(update.operands[0])
        return target.opcode == "parameter" or self._in_place(target)

    def _is_result(self, instruction: Instruction) -> bool:
        """Return whether a value is a result of the fusion itself and nothing else."""
        # An inner fusion writes no memory: its result stays in registers of the outer one.
        if self.nested:
            return False
        if instruction is self.computation.root:
            return True
        return all(
            (user.opcode == "bitcast" and self._is_result(user))
            or (user.opcode == "tuple" and user is self.computation.root)
            or (index in _updates(user) and self._is_result(user))
            for user, index in self.computation.users[instruction.id]
        )

    def _is_library_workspace(self, source: Instruction) -> bool:
        if source.opcode != "get-tuple-element":
            return False
        call = self.computation.operand(source, 0)
        return (
            call.opcode == "custom-call"
            and _WITH_WORKSPACE.fullmatch(call.target) is not None
            and source.element == len(call.results) - 1
            and _is_workspace(call.results[-1])
        )
