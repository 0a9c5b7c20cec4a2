"""Count the FLOPs of dots, convolutions and the library calls that stand for them.

A multiply-add counts as two FLOPs, also for complex numbers, and once whatever precision is
requested (a TPU may need several passes). A convolution counts only window positions that fall on
elements of its input, not on padding or on the holes of a dilation: XLA:TPU writes every dot as a
convolution, and a batched dot as a convolution dilated so far that a window of any size holds a
single element.
"""

# The errors here are about programs that XLA's compilers write: no user can cause or fix them.

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import halfstep.kernels._block_product as block_product
from halfstep._preflight.hlo.program import Computation, Instruction
from halfstep._preflight.hlo.shapes import Array
from halfstep._preflight.hlo.wire import Message

_GEMMS = frozenset(("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"))
# The most elements of a window, which are gone through one by one. No real window is as large.
_WIDEST = 2**22

# Instructions that compute and whose FLOPs are not known here.
_OPAQUE = re.compile(r"cholesky|fft|triangular-solve|.*(dot|convolution|matmul)")

# Custom calls that only inform the compiler or name a buffer.
ANNOTATIONS = re.compile(
    r"Sharding|SPMD\w+|xla\.sdy\..*|annotate_device_placement|LayoutConstraint|InspectSharding"
    r"|AllocateBuffer|ConcatBitcast|CreateBuffer|Pin|Unpin|AssumeGatherIndicesInBound"
    r"|GatherScatterIndicesBitpacked|AsyncCollective(Start|Done)"
)
# Custom calls that move, sort or draw bits, or compute on the host. A call that is in neither list
# and is not a contraction is reported as not counted.
_HARMLESS = re.compile(
    r"MoveTo(Host|Device)|X64(Combine|SplitLow|SplitHigh)|PadToStatic|SliceToDynamic|HostExecute"
    r"|(__gpu\$)?TopK|PartialReduce|ApproxTopK|__cub\$\w+|cu_threefry2x32(_ffi)?|RngBitGenerator\w*"
    r"|(cu_)?lu_pivots_to_permutation(_ffi)?|xla_(ffi_)?(partitioned_|buffer_)*python_\w*callback"
)


@dataclass(frozen=True, slots=True)
class Contracted:
    """One contraction: its operands, its result, and its FLOPs."""

    lhs: Array
    rhs: Array
    out: Array
    flops: int


def contraction(computation: Computation, instruction: Instruction) -> Contracted | None:
    """Return the contraction that an instruction computes, if any.

    Args:
        computation: The computation that the instruction is in.
        instruction: Any instruction.

    Raises:
        ValueError: If the instruction is a contraction whose dimensions cannot be read.
    """
    match instruction.base:
        case "dot" | "scaled-dot":
            return _dot(computation, instruction)
        case "ragged-dot":
            return _ragged_dot(computation, instruction)
        case "convolution":
            lhs, rhs = _arrays(computation, instruction)[:2]
            out = instruction.results[0]
            flops = _convolution(instruction, lhs.dims, rhs.dims, out.dims)
            return Contracted(lhs, rhs, out, flops)
        case "custom-call":
            return _library(computation, instruction)
        case _:
            return None


def decoded(found: Contracted) -> Contracted:
    """Return a contraction as a kernel without units for blocks computes it: in bfloat16."""
    lhs, rhs = (replace(array, dtype="bfloat16", bits=16) for array in (found.lhs, found.rhs))
    return replace(found, lhs=lhs, rhs=rhs)


def uncounted(instruction: Instruction) -> str | None:
    """Return the name of an instruction that may compute but is not a known contraction."""
    if instruction.base != "custom-call":
        return instruction.base if _OPAQUE.fullmatch(instruction.base) else None
    target = instruction.target
    return None if ANNOTATIONS.fullmatch(target) or _HARMLESS.fullmatch(target) else target


def _arrays(computation: Computation, instruction: Instruction) -> tuple[Array, ...]:
    """Return the operands' shapes; the first two are the factors."""
    shapes = computation.shapes(instruction)
    arrays = tuple(shape for shape in shapes if isinstance(shape, Array))
    if len(arrays) != len(shapes) or len(shapes) < 2 or not instruction.results:
        found = f"operands of the shapes {shapes} and {len(instruction.results)} results"
        raise instruction.error(f"two arrays as operands and an array as the result, not {found},")
    return arrays


def _sizes(instruction: Instruction, array: Array, dims: Sequence[int]) -> int:
    if any(not 0 <= dim < len(array.dims) for dim in dims):
        raise instruction.error(f"dimensions {tuple(dims)} within the shape {array.dims}")
    return math.prod(array.dims[dim] for dim in dims)


def _dot(computation: Computation, instruction: Instruction) -> Contracted:
    arrays = _arrays(computation, instruction)
    (lhs, rhs), out = arrays[:2], instruction.results[0]
    # Every element of the result is a sum over the contracted dimensions. The size of the result
    # already includes the batch dimensions.
    contracted = _sizes(instruction, lhs, instruction.dot_dimensions.integers(1))
    # scaled-dot has the scales after both factors, or each scale, one for a block, after its own.
    own = instruction.dot_dimensions.integers(2)
    if len(arrays) >= 4 and _sizes(instruction, rhs, own) < contracted:
        rhs = arrays[2]
    return Contracted(lhs, rhs, out, 2 * out.size * contracted)


def _ragged_dot(computation: Computation, instruction: Instruction) -> Contracted:
    """Count a ragged dot with full groups, which is the most: each row meets one group's matrix."""
    lhs, rhs = _arrays(computation, instruction)[:2]
    out = instruction.results[0]
    contracting = instruction.dot_dimensions.integers(1)
    flops = 2 * out.size * _sizes(instruction, lhs, contracting)
    ragged = instruction.ragged_dimensions
    if not ragged:
        raise instruction.error("`lhs_ragged_dimensions`")
    if set(ragged) <= set(contracting):
        # The groups split the contracted dimension, and the result has one slice per group.
        flops //= out.dims[0]
    return Contracted(lhs, rhs, out, flops)


def _library(computation: Computation, instruction: Instruction) -> Contracted | None:
    target = instruction.target
    if target in _GEMMS:
        lhs, rhs = _arrays(computation, instruction)[:2]
        # Every element of the left operand meets every free column of the right one.
        free = rhs.size // max(1, _sizes(instruction, rhs, _shared_dimensions(instruction)))
        return Contracted(lhs, rhs, instruction.results[0], 2 * lhs.size * free)
    if target == "__cudnn$blockScaledDot":
        # The operands are always (batch, m, k) and (batch, n, k), followed by the scales.
        lhs, rhs = _arrays(computation, instruction)[:2]
        out = instruction.results[0]
        return Contracted(lhs, rhs, out, 2 * out.size * lhs.dims[-1])
    if target.startswith("mosaic_gpu") and block_product.NAME in instruction.op_name:
        # The factors are (batch, m, k) and (batch, n, k) again, each followed by its scales.
        lhs, _, rhs = _arrays(computation, instruction)[:3]
        out = instruction.results[0]
        return Contracted(lhs, rhs, out, 2 * out.size * lhs.dims[-1])
    if target.startswith("__cudnn$conv"):
        lhs, rhs = _arrays(computation, instruction)[:2]
        out = instruction.results[0]
        # All of these calls have the dimension numbers of the forward convolution.
        roles = (lhs, rhs, out)
        if target.endswith("BackwardInput"):
            roles = (out, rhs, lhs)
        elif target.endswith("BackwardFilter"):
            roles = (lhs, out, rhs)
        flops = _convolution(instruction, *(role.dims for role in roles))
        return Contracted(lhs, rhs, out, flops)
    return None


def _shared_dimensions(instruction: Instruction) -> list[int]:
    """Return the dimensions of the right operand of a library call that the left one has, too."""
    text = instruction.backend_config
    try:
        config = json.loads(text)
        numbers = config.get("gemm_backend_config", config)["dot_dimension_numbers"]
        keys = ("rhs_contracting_dimensions", "rhs_batch_dimensions")
        return [int(dim) for key in keys for dim in numbers.get(key, ())]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise instruction.error(
            f"`dot_dimension_numbers` in its backend_config `{text[:80]}`"
        ) from None


def _convolution(
    instruction: Instruction,
    lhs: tuple[int, ...],
    rhs: tuple[int, ...],
    out: tuple[int, ...],
) -> int:
    numbers = instruction.convolution_dimensions
    if numbers is None:
        raise instruction.error("`convolution_dimension_numbers`")
    # Of each role, the dimension of the batch, of the features and of space: the features of the
    # kernel are those of the input, and its batch is the features of the output.
    roles = ((lhs, 7, 8, 11), (rhs, 4, 3, 6), (out, 9, 10, 12))
    (_, _, inputs), (_, summed, windows), (batch, features, outputs) = (
        _by_role(instruction, numbers, *role) for role in roles
    )
    if not len(windows) == len(inputs) == len(outputs) == len(instruction.window):
        raise instruction.error(f"a window with {len(inputs)} dimensions")
    positions = 1
    # Dimensions are independent of each other, so their valid positions multiply.
    for before, after, message in zip(inputs, outputs, instruction.window, strict=True):
        # The size, the stride, the padding before the first element, and both dilations. The
        # padding after the last element follows from the output.
        size, stride, pad, dilation, base = (message.integer(at) for at in (1, 2, 3, 5, 6))
        if not 0 <= size <= _WIDEST or min(stride, dilation, base) < 0:
            raise instruction.error(f"a window of at most {_WIDEST} elements, not {size}")
        spatial = (size, max(1, stride), pad, max(1, dilation), max(1, base))
        positions *= _valid_positions(before, after, *spatial)
    return 2 * positions * summed * batch * features


def _by_role(
    instruction: Instruction,
    numbers: Message,
    dims: tuple[int, ...],
    batch: int,
    features: int,
    space: int,
) -> tuple[int, int, tuple[int, ...]]:
    """Return the sizes of a role's dimensions, whose numbers are in these fields."""
    order = (numbers.integer(batch), numbers.integer(features), *numbers.integers(space))
    if sorted(order) != list(range(len(dims))):
        raise instruction.error(f"dimension numbers that fit the shape {dims}, not {order}")
    first, second, *spatial = (dims[at] for at in order)
    return first, second, tuple(spatial)


def _valid_positions(
    inputs: int, outputs: int, size: int, stride: int, pad: int, dilation: int, base: int
) -> int:
    """Count the pairs of an output and a window element that meet on an element of the input.

    A pair meets at `output * stride + element * dilation - pad` of an input whose elements are
    `base` apart, so for each window element the valid outputs are an arithmetic progression.
    """
    last = (inputs - 1) * base
    common = math.gcd(stride, base)
    apart = base // common
    count = 0
    for element in range(size):
        offset = element * dilation - pad
        # No multiple of the stride reaches an element: all positions are on holes.
        if offset % common:
            continue
        low = max(0, -(offset // stride))
        high = min(outputs - 1, (last - offset) // stride)
        # The smallest output from `low` on with output * stride + offset divisible by base.
        start = (-offset // common) * pow(stride // common, -1, apart) % apart if apart > 1 else 0
        first = low + (start - low) % apart
        if first <= high:
            count += (high - first) // apart + 1
    return count
