"""Count contractions, collectives and memory traffic of a compiled step, from its optimized HLO."""

# The errors here are about programs that XLA's compilers write: no user can cause or fix them.

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from halfstep._autocast import ELEMENTS, ROUNDED
from halfstep._preflight.hlo.collectives import payload
from halfstep._preflight.hlo.contraction_flops import (
    Contracted,
    contraction,
    decoded,
    uncounted,
)
from halfstep._preflight.hlo.metadata import InstructionOrigin
from halfstep._preflight.hlo.products import Product as Product
from halfstep._preflight.hlo.program import Computation, Instruction, Module, read_module
from halfstep._preflight.hlo.shapes import Array, UnknownTypeError
from halfstep._preflight.hlo.traffic import Kernel as Kernel, moved
from halfstep._preflight.hlo.trip_counts import ValueFrame, loop_frames, trip_count

# The name of a product of blocks: JAX's name of the operation.
_SCALED = "scaled_dot"


@dataclass(frozen=True)
class Contraction:
    """All contractions of a step with the same dtypes: dots, convolutions, library calls.

    Attributes:
        lhs: The dtype of the left operand as the instruction takes it, such as `bfloat16`.
        rhs: The dtype of the right operand.
        out: The dtype the instruction produces.
        flops: FLOPs per device and step, two for a multiply-add.
        count: How many such contractions a device runs in a step.
    """

    lhs: str
    rhs: str
    out: str
    flops: int
    count: int


@dataclass(frozen=True)
class Collective:
    """All collectives of a step of one kind and dtype.

    Attributes:
        kind: The operation, such as `all-gather` or `reduce-scatter`.
        dtype: The dtype that is sent. One operation over several dtypes counts for each of them.
        bytes: Payload per device and step: the larger of the input and the output of each.
        count: How many of them a device takes part in per step.
    """

    kind: str
    dtype: str
    bytes: int
    count: int


@dataclass(frozen=True)
class Analysis:
    """The work of one device in a step, read from the program that the compiler made.

    Everything inside a loop counts once per iteration, and its condition once more than that. A
    conditional counts its most expensive branch, by FLOPs and then by traffic. Operations on the
    host do not count.

    Attributes:
        contractions: FLOPs by dtype, the most first. A dot that the compiler rewrote as a
            multiplication and a sum (often one with a dimension of size 1) is not among them.
        uncounted: Custom calls that may compute and whose FLOPs are not known, such as Pallas
            kernels: their target and how often each runs.
        collectives: Communication by kind and dtype, the most first.
        kernels: The kernels by the bytes that they read and write, the most traffic first.
        unknown_trip_counts: Loops whose number of iterations is not known; they count once.
        products: The contractions one by one, the most FLOPs first.
        written: Bytes that the kernels write, by dtype, the most first.
    """

    contractions: tuple[Contraction, ...]
    uncounted: tuple[tuple[str, int], ...]
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    unknown_trip_counts: int
    products: tuple[Product, ...] = ()
    written: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def flops(self) -> int:
        """FLOPs of all contractions."""
        return sum(contraction.flops for contraction in self.contractions)

    @property
    def traffic_bytes(self) -> int:
        """Bytes that all kernels read and write, without regard to caches.

        A kernel reads each operand once and writes each result once. If it slices an array or
        updates it in place, only the slice counts. Arrays on chip or on the host do not count.
        """
        return sum((kernel.read + kernel.written) * kernel.count for kernel in self.kernels)


def analyze(program: bytes, *, block_units: bool = True) -> Analysis:
    """Count what a compiled step does.

    Args:
        program: An optimized program for a CPU, GPU or TPU, a message `xla.HloModuleProto`.
        block_units: Whether the device multiplies elements together with the scales of their
            blocks. Kernels for other devices decode blocks to bfloat16 and multiply these.

    Returns:
        The counts, per device and step.

    Raises:
        ValueError: If the bytes are not such a program, or if something in it that would have to
            be counted cannot be read; the message names the instruction.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep._preflight.hlo.analysis import analyze

        x = jnp.ones((64, 32))
        compiled = jax.jit(lambda x: x @ x.T).lower(x).compile()
        (module,) = compiled.runtime_executable().hlo_modules()
        assert analyze(module.as_serialized_hlo_module_proto()).flops == 2 * 64 * 64 * 32
        ```
    """
    module = read_module(program)
    walk = _Walk(module, block_units=block_units)
    try:
        tally = walk.computation(ValueFrame(module, module.entry))
    # No compiler writes instructions without the operands that they need, or calls so deep.
    except (LookupError, RecursionError) as error:
        raise ValueError(f"the optimized program is damaged: {error!r}") from error
    products = [
        Product(
            str(key.lhs),
            str(key.rhs),
            str(key.out),
            flops,
            tally.contractions[key],
            key.origin.name,
            key.origin.source,
        )
        for key, flops in tally.flops.items()
    ]
    return Analysis(
        contractions=tuple(
            sorted(_by_dtypes(tally), key=lambda c: (-c.flops, c.lhs, c.rhs, c.out))
        ),
        products=tuple(sorted(products, key=lambda p: (-p.flops, p.source, p.name, str(p)))),
        uncounted=tuple(sorted(tally.uncounted.items(), key=lambda item: (-item[1], item[0]))),
        collectives=tuple(
            sorted(
                (
                    Collective(kind, dtype, size, tally.collectives[kind, dtype])
                    for (kind, dtype), size in tally.sent.items()
                ),
                key=lambda c: (-c.bytes, c.kind, c.dtype),
            )
        ),
        kernels=tuple(
            sorted(
                (Kernel(read, written, n) for (read, written), n in tally.kernels.items()),
                key=lambda k: (-(k.read + k.written) * k.count, k.read, k.count),
            )
        ),
        unknown_trip_counts=len(walk.unknown),
        written={
            dtype: size
            for dtype, size in sorted(tally.written.items(), key=lambda item: (-item[1], item[0]))
            if size
        },
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    """Contractions that are alike."""

    lhs: Array
    rhs: Array
    out: Array
    origin: InstructionOrigin


def _by_dtypes(tally: "_Tally") -> list[Contraction]:
    flops: Counter[tuple[str, str, str]] = Counter()
    count: Counter[tuple[str, str, str]] = Counter()
    for key, computed in tally.flops.items():
        dtypes = (key.lhs.dtype, key.rhs.dtype, key.out.dtype)
        flops[dtypes] += computed
        count[dtypes] += tally.contractions[key]
    return [Contraction(*dtypes, flops[dtypes], count[dtypes]) for dtypes in flops]


@dataclass
class _Tally:
    """Counts of one computation."""

    flops: Counter[_Kind] = field(default_factory=Counter)
    contractions: Counter[_Kind] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    collectives: Counter[tuple[str, str]] = field(default_factory=Counter)
    kernels: Counter[tuple[int, int]] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)

    def add(self, other: "_Tally", times: int = 1) -> None:
        for name in self.__dataclass_fields__:
            mine, others = getattr(self, name), getattr(other, name)
            for key, count in others.items():
                mine[key] += times * count

    def contract(self, found: Contracted, origin: InstructionOrigin) -> None:
        # Products are alike wherever their factors lie.
        lhs, rhs, out = (
            replace(array, space=0, in_memory=True) for array in (found.lhs, found.rhs, found.out)
        )
        key = _Kind(lhs, rhs, out, origin)
        self.flops[key] += found.flops
        self.contractions[key] += 1

    def from_origin(self, origin: InstructionOrigin) -> "_Tally":
        """Return the counts with an origin for the products of blocks that have none."""
        made = replace(self, flops=Counter(), contractions=Counter())
        for kind, flops in self.flops.items():
            known = replace(kind, origin=origin) if _is_nameless(kind) else kind
            made.flops[known] += flops
            made.contractions[known] += self.contractions[kind]
        return made

    @property
    def cost(self) -> tuple[int, int]:
        traffic = sum((read + written) * n for (read, written), n in self.kernels.items())
        return sum(self.flops.values()), traffic


class _Walk:
    """Goes through a program the way a device would."""

    def __init__(self, module: Module, *, block_units: bool):
        self.module, self.block_units = module, block_units
        # A set, because the walk meets a loop more than once if it is inside another loop, or in a
        # function that is called twice.
        self.unknown: set[Instruction] = set()
        # Only fusions are remembered. A fusion computes the same wherever it is called, while the
        # trip counts of loops in other computations depend on their arguments.
        self.fusions: dict[int, _Tally] = {}

    def computation(self, frame: ValueFrame) -> _Tally:
        """Count the work of a computation that runs instruction by instruction."""
        tally = _Tally()
        for instruction in frame.computation:
            inner = self.control(frame, instruction)
            if inner is not None:
                tally.add(inner)
                continue
            try:
                self.instruction(frame.computation, instruction, tally, fused=False)
                bytes_moved = moved(self.module, frame.computation, instruction)
            # An unknown type matters only where its bytes are counted; programs that have one
            # elsewhere can be read.
            except UnknownTypeError as error:
                raise instruction.error(f"{error}") from None
            if bytes_moved is not None:
                read, written = bytes_moved
                tally.kernels[read, written.total()] += 1
                tally.written.update(written)
        return tally

    def control(self, frame: ValueFrame, instruction: Instruction) -> _Tally | None:
        """Count the work of the computations that an instruction runs; `None` if it runs none."""
        match instruction.base:
            case "while":
                iterations = trip_count(frame, instruction)
                if iterations is None:
                    self.unknown.add(instruction)
                    iterations = 1
                tally = _Tally()
                body, condition = loop_frames(frame, instruction)
                tally.add(self.computation(body), iterations)
                # The condition is evaluated one last time, when it is false.
                tally.add(self.computation(condition), iterations + 1)
                return tally
            case "conditional":
                branches = self.module.called(instruction, 0)
                tallies = [
                    # Operand 0 is the index, followed by one operand for each branch.
                    self.computation(frame.call(instruction, branch, first=number))
                    for number, branch in enumerate(branches, start=1)
                ]
                # Values decide which branch runs; the branch that costs the most is an upper bound.
                return max(tallies, key=lambda tally: tally.cost)
            # The `-done` and `-update` of an asynchronous call name the computation as well, and
            # run nothing.
            case "call" | "async" if not instruction.opcode.endswith(("-done", "-update")):
                if instruction.on_host:
                    return _Tally()
                (called,) = self.module.called(instruction)
                return self.computation(frame.call(instruction, called))
            case _:
                return None

    def instruction(
        self, computation: Computation, instruction: Instruction, tally: _Tally, *, fused: bool
    ) -> None:
        """Add the contractions and collectives of one instruction, which may be a fusion."""
        if instruction.base == "fusion":
            (called,) = self.module.called(instruction)
            # Contractions and collectives inside a fusion count, but traffic inside it does not:
            # the fusion becomes one kernel, whose reads and writes `moved` counts from outside.
            inner = self.fused(called)
            if any(map(_is_nameless, inner.flops)):
                inner = inner.from_origin(self.of_operands(computation, instruction))
            tally.add(inner)
            return
        found = contraction(computation, instruction)
        if found and instruction.base == "scaled-dot":
            found = found if self.block_units else decoded(found)
            tally.contract(found, self.of_operands(computation, instruction))
        elif found:
            tally.contract(found, instruction.origin)
        name = None if found else uncounted(instruction)
        if name is not None:
            tally.uncounted[name] += 1
        for key, size in payload(computation, instruction, fused=fused).items():
            tally.sent[key] += size
            tally.collectives[key] += 1

    def of_operands(self, computation: Computation, instruction: Instruction) -> InstructionOrigin:
        """Find where a product of blocks comes from, by the operations that encode its factors.

        XLA forgets the name and the line of such a product. Each factor is encoded on the line of
        its product, except for one that a loop or a fusion is given.
        """
        scope = ELEMENTS if self.block_units else ROUNDED
        waiting = [computation[number] for number in instruction.operands]
        while waiting:
            found = waiting.pop(0)
            origin = found.origin
            if found.base not in ("parameter", "get-tuple-element") and origin.source:
                outer = origin.name.rpartition("/")[0]
                name = "/".join(filter(None, (outer, scope, _SCALED)))
                return replace(origin, name=name)
            if found.base in ("bitcast", "copy", "transpose", "reshape"):
                waiting += [computation[number] for number in found.operands]
        return InstructionOrigin(f"{scope}/{_SCALED}", "")

    def fused(self, computation: Computation) -> _Tally:
        """Count the work of a fused computation."""
        if computation.id not in self.fusions:
            tally = _Tally()
            for instruction in computation:
                self.instruction(computation, instruction, tally, fused=True)
            self.fusions[computation.id] = tally
        return self.fusions[computation.id]


def _is_nameless(kind: _Kind) -> bool:
    """Return whether a product of blocks has no line yet."""
    return kind.origin.name.endswith(_SCALED) and not kind.origin.source
