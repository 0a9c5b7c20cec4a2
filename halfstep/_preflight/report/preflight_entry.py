"""Collect what a compiler says about one step on one target."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from halfstep._preflight.compile.compiler import CompilerAnswer, required_bytes
from halfstep._preflight.compile.lowering import Program
from halfstep._preflight.hlo.analysis import Analysis, Collective, Contraction, analyze
from halfstep._preflight.hlo.buffer_roles import TEMPORARIES as TEMPORARIES
from halfstep._preflight.hlo.products import F8Count, Product, f8_count
from halfstep._preflight.hlo.wire import Message
from halfstep._preflight.report.peak import CODE as CODE, OUTPUTS as OUTPUTS, Peak, make_peak
from halfstep._preflight.report.roles import Argument, roles as bytes_by_role
from halfstep._preflight.report.roofline import Roofline, roofline
from halfstep._preflight.target.targets import Target
from halfstep._version import __version__

PADDING = "layout padding"


@dataclasses.dataclass(frozen=True)
class PreflightEntry:
    """One step, compiled for one target. All figures are for one device.

    A figure that the compiler does not give is `None`. When a TPU's compiler gives up because the
    memory is too small, its message is in `notes`, and `fits` is false.

    Attributes:
        target: The target that the step was compiled for.
        variant: The name of the step.
        devices: How many devices the step is for.
        fits: Whether the peak is at most the usable memory.
        capacity_bytes: The device's memory.
        usable_bytes: The memory that JAX takes: by default three quarters on a GPU, all on a TPU.
        peak_bytes: The most memory in use at a time: arguments, outputs and temporaries.
        argument_bytes: Bytes in use before the step: parameters, optimizer state, batch.
        output_bytes: Bytes that the step returns, with those that take the place of arguments.
        alias_bytes: Bytes of outputs that take the place of donated arguments.
        temp_bytes: Bytes that the step needs in between; most are kept for the backward pass.
        memory: The peak by role: parameters, optimizer state, batch, other, outputs, temporaries
            ...
        contractions: FLOPs of matrix products and convolutions in the optimized program, by dtype.
        products: The same contractions one by one: dtypes, shapes, scope and line, the most FLOPs
            first. Lines are from when the program was compiled; an answer from the cache can have
            old ones.
        f8_units: Whether the target has fp8 units.
        uncounted: Kernels that may compute and whose FLOPs cannot be told from outside: name and
            count.
        collectives: The data that is sent between devices, by kind and dtype.
        traffic_bytes: Bytes that the optimized program's kernels read and write.
        roofline: A lower bound on the step's time. It is not a measurement, and not an estimate.
        estimates: The compiler's own cost model, where it has one (TPU) and where it is not
            negative.
        gemm: On a GPU, which kernels compute the matrix products: `"triton"` (XLA's own) or
            `"library"` (cuBLAS).
        flags: The flags that XLA was given.
        versions: The versions of halfstep, JAX and the compilers.
        notes: Remarks: kernels that are not counted, messages of a compiler.
        hlo: The optimized program as text; empty in a report that was loaded.
        proto: The optimized program and its buffer assignment as a message `xla.HloProto`, from
            which preflight counts; empty in a report that was loaded.
        arguments: The arrays that the step is given: name, role, dtype, shape, bytes, donated.
            `None` in a report that was saved before halfstep kept them.
        program: A fingerprint of the program that the compiler was given. Two entries with the same
            fingerprint differ by what the compiler does. `None` as above.
        written: Bytes that the optimized program's kernels write, by dtype. `None` as above.
        peak: The contents of the memory at the peak, by role, scope and line, from the compiler's
            buffer assignment; also for a step that a TPU's compiler gave up on. `None` as above, or
            if the compiler does not say.
        host_bytes: Bytes that the step keeps in the host's memory. `None` as above.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def double(x):
            return 2 * x


        x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

        entry = halfstep.preflight(double, (x,), targets="h100")["h100"]
        assert entry.fits and entry.argument_bytes == entry.output_bytes == 4 * 2**20
        ```
    """

    target: str
    variant: str
    devices: int
    fits: bool
    capacity_bytes: int
    usable_bytes: int
    peak_bytes: int | None
    argument_bytes: int | None
    output_bytes: int | None
    alias_bytes: int | None
    temp_bytes: int | None
    memory: Mapping[str, int]
    contractions: tuple[Contraction, ...] | None
    products: tuple[Product, ...] | None
    f8_units: bool
    uncounted: tuple[tuple[str, int], ...]
    collectives: tuple[Collective, ...] | None
    traffic_bytes: int | None
    roofline: Roofline | None
    estimates: Mapping[str, float]
    gemm: str | None
    flags: tuple[str, ...]
    versions: Mapping[str, str]
    notes: tuple[str, ...]
    hlo: str = dataclasses.field(repr=False, compare=False)
    arguments: tuple[Argument, ...] | None = dataclasses.field(default=None, repr=False)
    program: str | None = None
    written: Mapping[str, int] | None = None
    peak: Peak | None = dataclasses.field(default=None, repr=False)
    host_bytes: int | None = None
    proto: bytes = dataclasses.field(default=b"", repr=False, compare=False)

    @property
    def headroom(self) -> int | None:
        """Usable memory that the step leaves; negative if it does not fit."""
        return None if self.peak_bytes is None else self.usable_bytes - self.peak_bytes

    @property
    def f8(self) -> F8Count | None:
        """How many contractions are in 8 bits or fewer."""
        return None if self.products is None else f8_count(self.products, units=self.f8_units)

    def contraction_flops(self) -> dict[str, int] | None:
        """Sum FLOPs by the operands' dtype, `"bfloat16"`, or by both, `"bfloat16 x float32"`."""
        if self.contractions is None:
            return None
        total: dict[str, int] = {}
        for found in self.contractions:
            same = found.lhs == found.rhs
            name = found.lhs if same else f"{found.lhs} x {found.rhs}"
            total[name] = total.get(name, 0) + found.flops
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the program itself, as plain values for JSON."""
        made = dataclasses.asdict(dataclasses.replace(self, hlo="", proto=b""))
        del made["hlo"], made["proto"]
        made["headroom"] = self.headroom
        made["contraction_flops"] = self.contraction_flops()
        made["f8"] = None if self.f8 is None else dataclasses.asdict(self.f8)
        # `asdict` has only fields; readers of the JSON look first for these computed values.
        for shown, product in zip(made["products"] or (), self.products or (), strict=True):
            shown |= {"in_f8": product.in_f8, "why_not": product.why_not}
        if self.roofline is not None:
            made["roofline"] |= {
                "label": "lower bound of the step time",
                "bound_seconds": self.roofline.bound_seconds,
                "limit": self.roofline.limit,
            }
        return made


def make_entry(
    variant: str,
    program: Program,
    compiled: CompilerAnswer,
    target: Target,
    arguments: tuple[Argument, ...],
    memory_fraction: float | None,
) -> PreflightEntry:
    """Make an entry from what the compiler said and what its program shows."""
    accelerator = target.accelerator
    fraction = accelerator.memory_fraction if memory_fraction is None else memory_fraction
    usable = int(accelerator.memory_bytes * fraction)
    said = compiled.memory
    roles = bytes_by_role(arguments)
    common: dict[str, Any] = {
        "target": target.name,
        "variant": variant,
        # A target's devices are counted only if the step is divided over them.
        "devices": max(1, target.devices if program.axes else 1),
        "capacity_bytes": accelerator.memory_bytes,
        "usable_bytes": usable,
        "f8_units": "float8" in accelerator.peak_flops,
        "gemm": compiled.gemm,
        "flags": compiled.flags,
        "versions": {"halfstep": __version__, **compiled.versions},
        "hlo": compiled.hlo,
        "proto": compiled.program,
        "arguments": arguments,
        "program": program.fingerprint,
    }
    if compiled.exceeded is not None:
        return _refused(common, compiled, compiled.exceeded)
    given, outputs = said["argument_size_in_bytes"], said["output_size_in_bytes"]
    alias, temporary = said["alias_size_in_bytes"], said["temp_size_in_bytes"]
    code = said.get("generated_code_size_in_bytes", 0)
    # This sum is within 2 % of XLA:GPU's own figure, where it gives one.
    peak = given + outputs - alias + temporary + code
    if accelerator.platform == "cuda":
        # XLA:TPU's figure of this name leaves out and includes memories other than the device's.
        peak = said.get("peak_memory_in_bytes") or peak
    host = sum(value for name, value in said.items() if name.startswith("host_"))
    analysis = analyze(Message(compiled.program).raw(1), block_units=accelerator.has_block_units)
    parts = dict(roles)
    # A TPU stores arrays in tiles, float32 in 8 by 128: an array with few columns takes more than
    # its elements.
    parts[PADDING] = max(0, given - sum(roles.values()))
    parts[OUTPUTS] = outputs - alias
    parts[CODE] = code
    # Temporaries are the rest, so that the parts add up to the peak: a bar of the plot is as long
    # as its figure.
    parts[TEMPORARIES] = max(0, peak - sum(parts.values()))
    return PreflightEntry(
        **common,
        fits=peak <= usable,
        peak_bytes=peak,
        argument_bytes=given,
        output_bytes=outputs,
        alias_bytes=alias,
        temp_bytes=temporary,
        memory={name: size for name, size in parts.items() if size},
        contractions=analysis.contractions,
        products=analysis.products,
        uncounted=analysis.uncounted,
        collectives=analysis.collectives,
        traffic_bytes=analysis.traffic_bytes,
        written=analysis.written,
        roofline=roofline(analysis, accelerator),
        # The cost model of XLA:TPU gives negative numbers for some programs.
        estimates={name: value for name, value in compiled.estimates.items() if value > 0},
        notes=tuple(_notes(analysis, host)),
        host_bytes=host,
        peak=make_peak(
            compiled.program,
            arguments,
            on_tpu=accelerator.platform == "tpu",
            peak_bytes=peak,
            code_bytes=code,
        ),
    )


def _refused(common: dict[str, Any], compiled: CompilerAnswer, why: str) -> PreflightEntry:
    """Make the entry of a step that the compiler could not fit: no program, few figures."""
    arguments = common["arguments"]
    return PreflightEntry(
        **common,
        fits=False,
        peak_bytes=required_bytes(why),
        argument_bytes=None,
        output_bytes=None,
        alias_bytes=None,
        temp_bytes=None,
        memory=bytes_by_role(arguments),
        contractions=None,
        products=None,
        uncounted=(),
        collectives=None,
        traffic_bytes=None,
        roofline=None,
        estimates={},
        notes=(f"the compiler gave up: {why}",),
        peak=make_peak(compiled.program, arguments, on_tpu=True, peak_bytes=None),
    )


def _notes(analysis: Analysis, host: int) -> list[str]:
    notes = []
    if analysis.unknown_trip_counts:
        notes.append(
            f"{analysis.unknown_trip_counts} loop(s) whose number of iterations the compiler does "
            "not know are counted once in FLOPs, collectives and traffic"
        )
    if analysis.uncounted:
        names = ", ".join(f"{name} ({count}x)" for name, count in analysis.uncounted)
        notes.append(f"kernels whose FLOPs are not counted: {names}")
    if host:
        notes.append(f"{host:,} bytes are kept in the host's memory")
    return notes
