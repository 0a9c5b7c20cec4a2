"""Matrix products of an optimized program, counted by what they multiply.

XLA:GPU writes a product as a `dot`, in a Triton fusion, or as a call of a library. What counts is
the dtype of the operands of that one instruction: what is converted before it is not multiplied in
8 bits.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from halfstep._preflight.hlo.contraction_flops import contraction, decoded
from halfstep._preflight.hlo.program import Computation, Instruction, read_module
from halfstep._preflight.hlo.trip_counts import ValueFrame, loop_frames, trip_count
from halfstep._preflight.hlo.wire import Message

MULTIPLE = 16
"""What the sizes of a product in 8 bits are multiples of."""


@dataclasses.dataclass(frozen=True)
class Product:
    """One product, `[batch, rows, summed] x [batch, summed, columns]`."""

    lhs: str
    rhs: str
    out: str
    batch: int
    rows: int
    summed: int
    columns: int

    @property
    def is_f8(self) -> bool:
        """Whether both factors have 8 bits as they are multiplied."""
        return all(name.startswith("float8_") for name in (self.lhs, self.rhs))

    @property
    def is_of_activations(self) -> bool:
        """Whether it is one for each example, as are attention scores: no factor is a weight."""
        return self.batch > 1

    @property
    def is_odd(self) -> bool:
        """Whether a size is not what products in 8 bits have to be multiples of."""
        return any(size % MULTIPLE for size in (self.rows, self.summed, self.columns))

    @property
    def is_eligible(self) -> bool:
        """Whether it could be one in 8 bits."""
        return not self.is_of_activations and not self.is_odd

    @property
    def flops(self) -> int:
        """Two for a multiply-add."""
        return 2 * self.batch * self.rows * self.summed * self.columns


@dataclasses.dataclass(frozen=True)
class Count:
    """How many products of a program are in 8 bits, and what the others are."""

    total: int
    f8: int
    of_activations: int
    odd: int
    f8_flops: int
    eligible_flops: int

    @property
    def eligible(self) -> int:
        """Those that could be in 8 bits."""
        return self.total - self.of_activations - self.odd

    def beside(self, reference: "Count") -> dict[str, int | float]:
        """Beside the float32 program, whose products are cuBLAS's.

        That one says how many products are not eligible, and how much there is to compute in those
        that are: Triton writes a large sum as a batch of smaller ones, and products that share a
        factor may be merged.
        """
        refused = reference.of_activations + reference.odd
        return {
            "f8": self.f8,
            "eligible": self.total - refused,
            "of_activations": reference.of_activations,
            "odd": reference.odd,
            "f8_share_of_flops": self.f8_flops / reference.eligible_flops,
        }


def count(program: bytes) -> Count:
    """Count the products of a program, each as often as its loop turns."""
    found = products(program)

    def total(chosen: Iterable[Product]) -> int:
        return sum(found[product] for product in chosen)

    f8 = [product for product in found if product.is_f8]
    wide = [product for product in found if not product.is_f8]
    eligible = [*f8, *(product for product in wide if product.is_eligible)]
    return Count(
        total=found.total(),
        f8=total(f8),
        of_activations=total(product for product in wide if product.is_of_activations),
        odd=total(p for p in wide if p.is_odd and not p.is_of_activations),
        f8_flops=sum(found[product] * product.flops for product in f8),
        eligible_flops=sum(found[product] * product.flops for product in eligible),
    )


def products(program: bytes) -> Counter[Product]:
    """The products of a program, and how often each is computed in one run.

    Args:
        program: An optimized program for a GPU, a message `xla.HloProto`.
    """
    module = read_module(Message(program).raw(1))
    found: Counter[Product] = Counter()
    _add(found, ValueFrame(module, module.entry), 1)
    return found


def _add(found: Counter[Product], frame: ValueFrame, times: int) -> None:
    for instruction in frame.computation:
        match instruction.base:
            case "while":
                turns = trip_count(frame, instruction)
                if turns is None:
                    raise instruction.error("a loop whose number of turns is known")
                _add(found, loop_frames(frame, instruction)[0], times * turns)
            case "conditional":
                raise instruction.error("a program without branches")
            case "fusion" | "call" | "async":
                if instruction.opcode.endswith(("-done", "-update")):
                    continue
                (called,) = frame.module.called(instruction)
                _add(found, frame.call(instruction, called), times)
            case _:
                made = _product(frame.computation, instruction)
                if made is not None:
                    found[made] += times


def _product(computation: Computation, instruction: Instruction) -> Product | None:
    seen = contraction(computation, instruction)
    if seen is None:
        return None
    if instruction.base == "scaled-dot":
        # The kernel of an H100 decodes blocks before it multiplies them.
        seen = decoded(seen)
    lhs, rhs = seen.lhs, seen.rhs
    if instruction.base in ("dot", "scaled-dot"):
        summed = instruction.dot_dimensions.integers(1)
        batch = instruction.dot_dimensions.integers(3)
    elif "cublas" in instruction.target:
        numbers = _numbers(instruction)
        summed = [int(axis) for axis in numbers.get("lhs_contracting_dimensions", ())]
        batch = [int(axis) for axis in numbers.get("lhs_batch_dimensions", ())]
    elif instruction.target.startswith("mosaic_gpu"):
        # The kernel for blocks: rows with rows.
        batch, summed = [0], [2]
    else:
        raise instruction.error("a dot, a call of cuBLAS or a kernel for blocks")
    shared, over = (math.prod(lhs.dims[axis] for axis in axes) for axes in (batch, summed))
    return Product(
        lhs=lhs.dtype,
        rhs=rhs.dtype,
        out=seen.out.dtype,
        batch=shared,
        rows=lhs.size // (shared * over),
        summed=over,
        columns=rhs.size // (shared * over),
    )


def _numbers(instruction: Instruction) -> dict[str, Any]:
    config = json.loads(instruction.backend_config)
    return config["gemm_backend_config"]["dot_dimension_numbers"]
