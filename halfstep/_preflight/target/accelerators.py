"""Describe the accelerators that a step can be compiled for, from `accelerators.toml`."""

import dataclasses
import importlib.resources
import tomllib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """Figures of a card that XLA's GPU compiler needs in addition to memory, bandwidth and cache.

    The names are those of the fields of XLA's `GpuDeviceInfoProto`. "Core" is a streaming
    multiprocessor. Fields with a default have the same value for every card of the table.
    """

    cuda_compute_capability: tuple[int, int]
    core_count: int
    fpus_per_core: int
    clock_rate_ghz: float
    threads_per_core_limit: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    shared_memory_per_block: int = 49152
    threads_per_block_limit: int = 1024
    threads_per_warp: int = 32
    block_dim_limit_x: int = 2**31 - 1
    block_dim_limit_y: int = 65535
    block_dim_limit_z: int = 65535
    registers_per_core_limit: int = 65536
    registers_per_block_limit: int = 65536
    dnn_version: tuple[int, int] = (9, 10)
    runtime_version: tuple[int, int, int] = (12, 9, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuFigures:
    """How libtpu names slices of a TPU, and how large they can be.

    Attributes:
        topology: libtpu's name of the generation: `"v5e"` in `"v5e:2x2"`.
        dimensions: How many numbers the shape of a slice has.
        devices_per_chip: JAX devices on one chip.
        pod_chips: Chips in a pod, which is the largest slice.
        longest_side: The largest number in a shape, where a pod is a fixed grid. For a larger
            number, libtpu aborts the process (v5e) or compiles for a slice that does not exist
            (v6e).
    """

    topology: str
    dimensions: Literal[2, 3]
    devices_per_chip: int
    pod_chips: int
    longest_side: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One kind of accelerator. All figures are for one JAX device.

    Attributes:
        name: Its name in a target, `"h100"`.
        description: The name that the driver or the vendor gives it.
        memory_bytes: The memory that the driver (GPU) or the compiler (TPU) reports. It is less
            than the vendor's figure, which includes the memory reserved for error correction and
            for the system.
        memory_fraction: The share of the memory that JAX takes by default.
        bandwidth: The bandwidth of the memory, in bytes per second.
        peak_flops: Dense contractions (no structured sparsity) in FLOP/s by the operands' format,
            accumulated in float32: `"float32"` (not on tensor cores), `"tf32"`, `"bfloat16"`,
            `"float16"`, `"float8"`, `"int8"`. A format without hardware units is absent, and so is
            float32 on a TPU, which multiplies it in passes of bfloat16.
        cache_bytes: The L2 cache of a GPU. 0 on a TPU, where the compiler itself decides which
            values stay on the chip.
        figures: Further figures that its compiler needs.
        sources: Where the figures are from, and which was taken where sources disagree.
    """

    name: str
    description: str
    memory_bytes: int
    memory_fraction: float
    bandwidth: float
    peak_flops: Mapping[str, float] = dataclasses.field(hash=False)
    cache_bytes: int
    figures: GpuFigures | TpuFigures
    sources: tuple[str, ...]

    @property
    def platform(self) -> Literal["cuda", "tpu"]:
        """JAX's name of the platform."""
        return "cuda" if isinstance(self.figures, GpuFigures) else "tpu"

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of a GPU; `None` for a TPU."""
        figures = self.figures
        return figures.cuda_compute_capability if isinstance(figures, GpuFigures) else None

    @property
    def has_block_units(self) -> bool:
        """Whether it multiplies elements together with the scales of their blocks."""
        return self.capability is not None and self.capability >= (10, 0)

    @property
    def pallas_name(self) -> str:
        """The device kind by which Pallas knows a GPU of this generation."""
        # Pallas knows only two boards of the Ada generation, and lowers for all of them alike.
        return "NVIDIA L4" if self.capability == (8, 9) else self.description

    @property
    def tpu_dimensions(self) -> int:
        """How many numbers the shape of a slice has; 0 for a GPU."""
        return self.figures.dimensions if isinstance(self.figures, TpuFigures) else 0


# Sources of all cards, in addition to their own.
_GPU_SOURCES = (
    "CUDA C++ Programming Guide, technical specifications per compute capability (threads, "
    "registers and shared memory of a multiprocessor, FP32 units)",
    "JAX documentation, GPU memory allocation: 75 % of the total is preallocated",
)


def _rates(teraflops: Mapping[str, float], *, share: float = 1.0) -> Mapping[str, float]:
    return MappingProxyType({key: rate * 1e12 * share for key, rate in teraflops.items()})


def _gpu(name: str, row: Mapping[str, Any], generations: Mapping[str, Any]) -> Accelerator:
    # Limits of the architecture are written once per generation. Figures that differ between boards
    # are written for each board.
    shared = dict(generations[row["generation"]])
    capability = tuple(shared.pop("cuda_compute_capability"))
    return Accelerator(
        name=name,
        description=row["description"],
        memory_bytes=row["memory_bytes"],
        memory_fraction=0.75,
        bandwidth=row["bandwidth"],
        peak_flops=_rates(row["peak_tflops"]),
        cache_bytes=row["cache_bytes"],
        figures=GpuFigures(
            cuda_compute_capability=capability,
            core_count=row["core_count"],
            clock_rate_ghz=row["clock_rate_ghz"],
            **shared,
        ),
        sources=(*row["sources"], *_GPU_SOURCES),
    )


def _tpu(name: str, row: Mapping[str, Any]) -> Accelerator:
    # The figures are those of a chip, which may be several devices.
    share = 1 / row["devices_per_chip"]
    return Accelerator(
        name=name,
        description=row["description"],
        memory_bytes=int(row["device_gib"] * 2**30),
        memory_fraction=1.0,
        bandwidth=row["chip_bandwidth"] * share,
        peak_flops=_rates(row["chip_peak_tflops"], share=share),
        cache_bytes=0,
        figures=TpuFigures(
            topology=row["topology"],
            dimensions=row["dimensions"],
            devices_per_chip=row["devices_per_chip"],
            pod_chips=row["pod_chips"],
            longest_side=row.get("longest_side"),
        ),
        sources=tuple(row["sources"]),
    )


def _read() -> Mapping[str, Accelerator]:
    file = importlib.resources.files("halfstep._preflight.target").joinpath("accelerators.toml")
    rows = tomllib.loads(file.read_text("utf-8"))
    gpus = {name: _gpu(name, row, rows["generations"]) for name, row in rows["gpus"].items()}
    return MappingProxyType({**gpus, **{n: _tpu(n, row) for n, row in rows["tpus"].items()}})


ACCELERATORS: Mapping[str, Accelerator] = _read()
"""The accelerators a target can name."""
