"""The accelerators a step can be compiled for, and where each figure about them is from."""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """What XLA's GPU compiler asks about a card beside its memory, bandwidth and cache.

    The names are those of the fields of XLA's `GpuDeviceInfoProto`. "Core" is a streaming
    multiprocessor. Every card of the table has the same limits where there is a default.
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
        topology: What libtpu calls the generation: `"v5e"` in `"v5e:2x2"`.
        dimensions: How many numbers the shape of a slice has.
        devices_per_chip: JAX devices on one chip.
        pod_chips: Chips in a pod, which is the largest slice there is.
        longest_side: The largest number in a shape, where a pod is a fixed grid. Beyond it
            libtpu aborts the process (v5e), or compiles for what does not exist (v6e).
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
        name: What a target calls it, `"h100"`.
        description: The name that the driver or the vendor gives it.
        memory_bytes: The memory that the driver (GPU) or the compiler (TPU) says there is. It is
            less than the vendor's figure, which counts what is kept back for error correction
            and for the system.
        memory_fraction: The part of it that JAX takes by default.
        bandwidth: Of that memory, in bytes a second.
        peak_flops: Dense contractions (no structured sparsity) in FLOP/s by the operands' format,
            accumulated in float32: `"float32"` (not on tensor cores), `"tf32"`, `"bfloat16"`,
            `"float16"`, `"float8"`, `"int8"`. What the hardware has no units for is absent, and
            so is float32 on a TPU, which multiplies it in passes of bfloat16.
        cache_bytes: The L2 cache of a GPU. 0 on a TPU, where the compiler itself places what
            stays on the chip.
        figures: What its compiler asks beside these.
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
        """What JAX calls the platform."""
        return "cuda" if isinstance(self.figures, GpuFigures) else "tpu"

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of a GPU; `None` for a TPU."""
        figures = self.figures
        return figures.cuda_compute_capability if isinstance(figures, GpuFigures) else None

    @property
    def pallas_name(self) -> str:
        """The device kind by which Pallas knows a GPU of this generation."""
        # Of the Ada generation Pallas knows two boards only, and lowers for all of them alike.
        return "NVIDIA L4" if self.capability == (8, 9) else self.description

    @property
    def tpu_dimensions(self) -> int:
        """How many numbers the shape of a slice has; 0 for a GPU."""
        return self.figures.dimensions if isinstance(self.figures, TpuFigures) else 0


_TERA = 1e12

_CUDA_GUIDE = (
    "CUDA C++ Programming Guide, technical specifications per compute capability (threads, "
    "registers and shared memory of a multiprocessor, FP32 units)"
)
_XLA_SPECS = "OpenXLA, xla/backends/gpu/target_config/specs"
_JAX_FRACTION = "JAX documentation, GPU memory allocation: 75 % of the total is preallocated"
_CLOUD_TPU = "Google Cloud TPU documentation, https://docs.cloud.google.com/tpu/docs"
_LIBTPU = 'libtpu 0.0.42.1: "exceeds available HBM" of a program that is too large'
_JAX_TPU = "JAX 0.10, TPU hardware table of Pallas"

_ampere = functools.partial(
    GpuFigures,
    cuda_compute_capability=(8, 0),
    fpus_per_core=64,
    threads_per_core_limit=2048,
    shared_memory_per_core=167936,
    shared_memory_per_block_optin=166912,
)
_ada = functools.partial(
    GpuFigures,
    cuda_compute_capability=(8, 9),
    fpus_per_core=128,
    threads_per_core_limit=1536,
    shared_memory_per_core=102400,
    shared_memory_per_block_optin=101376,
)
# XLA reads 9.0 and 10.0 without a feature extension as 9.0a and 10.0a, which is what it asks of
# the cards themselves.
_hopper = functools.partial(
    GpuFigures,
    cuda_compute_capability=(9, 0),
    fpus_per_core=128,
    threads_per_core_limit=2048,
    shared_memory_per_core=233472,
    shared_memory_per_block_optin=232448,
)
_blackwell = functools.partial(_hopper, cuda_compute_capability=(10, 0))


def _gpu(
    name: str,
    description: str,
    figures: GpuFigures,
    *,
    memory_bytes: int,
    bandwidth: float,
    cache_bytes: int,
    peak_tflops: Mapping[str, float],
    sources: tuple[str, ...],
) -> Accelerator:
    return Accelerator(
        name=name,
        description=description,
        memory_bytes=memory_bytes,
        memory_fraction=0.75,
        bandwidth=bandwidth,
        peak_flops=MappingProxyType({key: rate * _TERA for key, rate in peak_tflops.items()}),
        cache_bytes=cache_bytes,
        figures=figures,
        sources=(*sources, _CUDA_GUIDE, _JAX_FRACTION),
    )


def _tpu(
    name: str,
    description: str,
    figures: TpuFigures,
    *,
    device_gib: float,
    chip_bandwidth: float,
    chip_peak_tflops: Mapping[str, float],
    sources: tuple[str, ...],
) -> Accelerator:
    share = 1 / figures.devices_per_chip
    return Accelerator(
        name=name,
        description=description,
        memory_bytes=int(device_gib * 2**30),
        memory_fraction=1.0,
        bandwidth=chip_bandwidth * share,
        peak_flops=MappingProxyType(
            {key: rate * _TERA * share for key, rate in chip_peak_tflops.items()}
        ),
        cache_bytes=0,
        figures=figures,
        sources=sources,
    )


def _gpus() -> tuple[Accelerator, ...]:
    hopper_tflops = {
        "float32": 66.9,
        "tf32": 494.7,
        "bfloat16": 989.4,
        "float16": 989.4,
        "float8": 1978.9,
        "int8": 1978.9,
    }
    ampere_tflops = {
        "float32": 19.5,
        "tf32": 156.0,
        "bfloat16": 312.0,
        "float16": 312.0,
        "int8": 624.0,
    }
    ampere_paper = "NVIDIA A100 Tensor Core GPU Architecture (whitepaper): dense peak rates"
    return (
        _gpu(
            "h100",
            "NVIDIA H100 80GB HBM3",
            _hopper(core_count=132, clock_rate_ghz=1.98),
            memory_bytes=84929347584,
            bandwidth=3352.32e9,
            cache_bytes=52428800,
            peak_tflops=hopper_tflops,
            sources=(
                "NVIDIA H100 Tensor Core GPU Architecture (whitepaper), H100 SXM5: dense peak "
                "rates. The data sheet has twice these, with sparsity",
                f"{_XLA_SPECS}/h100_sxm.txtpb: multiprocessors, clock, bandwidth (2619 MHz, 5120 "
                "bit), L2. Its memory is 84942979072 bytes; 84929347584, which another driver "
                "reports, is 0.02 % less",
            ),
        ),
        _gpu(
            "h200",
            "NVIDIA H200",
            _hopper(core_count=132, clock_rate_ghz=1.98),
            memory_bytes=150109880320,
            bandwidth=4800e9,
            cache_bytes=52428800,
            peak_tflops=hopper_tflops,
            sources=(
                "NVIDIA H200 Tensor Core GPU (data sheet), H200 SXM: the peak rates of the H100 "
                "SXM; 4.8 TB/s",
                f"{_XLA_SPECS}/h200.txtpb: multiprocessors, clock, L2",
                "memory as drivers report it: 150109880320 bytes, and 139.80 GiB in public "
                "out-of-memory messages. XLA's file has 141 GiB, which no driver reports",
            ),
        ),
        _gpu(
            "a100-80gb",
            "NVIDIA A100-SXM4-80GB",
            _ampere(core_count=108, clock_rate_ghz=1.41),
            memory_bytes=85100068864,
            bandwidth=2039.04e9,
            cache_bytes=41943040,
            peak_tflops=ampere_tflops,
            sources=(
                ampere_paper,
                f"{_XLA_SPECS}/a100_sxm_80.txtpb: multiprocessors, clock, memory, bandwidth, L2. "
                "deviceQuery reports the same memory, and 84987740160 bytes under an older driver",
            ),
        ),
        _gpu(
            "a100-40gb",
            "NVIDIA A100-SXM4-40GB",
            _ampere(core_count=108, clock_rate_ghz=1.41),
            memory_bytes=42298834944,
            bandwidth=1555.2e9,
            cache_bytes=41943040,
            peak_tflops=ampere_tflops,
            sources=(
                ampere_paper,
                f"{_XLA_SPECS}/a100_sxm_40.txtpb: multiprocessors, clock, bandwidth, L2. It has "
                "two figures for the memory; taken is the smaller, which deviceQuery reports too",
            ),
        ),
        _gpu(
            "b200",
            "NVIDIA B200",
            _blackwell(core_count=148, clock_rate_ghz=1.965),
            memory_bytes=191514411008,
            bandwidth=7672.32e9,
            cache_bytes=132644864,
            peak_tflops={
                "float32": 75.0,
                "tf32": 1125.0,
                "bfloat16": 2250.0,
                "float16": 2250.0,
                "float8": 4500.0,
                "int8": 4500.0,
            },
            sources=(
                "NVIDIA Blackwell Architecture (technical brief and data sheet), HGX B200, one "
                "GPU: half of the rates, which are with sparsity. TF32 is printed as 2.2 PFLOPS; "
                "taken is half of BF16, which it rounds",
                f"{_XLA_SPECS}/b200.txtpb: multiprocessors, clock, memory, L2, bandwidth (3996 "
                "MHz, 7680 bit). The data sheet has 7.7 TB/s; 8 TB/s is the GB200's",
            ),
        ),
        _gpu(
            "l4",
            "NVIDIA L4",
            _ada(core_count=58, clock_rate_ghz=2.04),
            memory_bytes=23583784960,
            bandwidth=300.048e9,
            cache_bytes=50331648,
            peak_tflops={
                "float32": 30.3,
                "tf32": 60.5,
                "bfloat16": 121.0,
                "float16": 121.0,
                "float8": 242.5,
                "int8": 242.5,
            },
            sources=(
                "NVIDIA L4 Tensor Core GPU (data sheet): half of the tensor core rates, which are "
                "with sparsity. TF32 is printed as 120; taken is half of BF16's 242, which it "
                "rounds",
                "deviceQuery on an L4 (driver for CUDA 12.2): multiprocessors, clock, memory, L2, "
                "bandwidth (6251 MHz, 192 bit). Other drivers report up to 22.03 GiB",
            ),
        ),
        _gpu(
            "rtx4070",
            "NVIDIA GeForce RTX 4070",
            _ada(core_count=46, clock_rate_ghz=2.475),
            memory_bytes=11866 * 2**20,
            bandwidth=504e9,
            cache_bytes=36 * 2**20,
            # NVIDIA prints no tensor core rates of this card by format. They follow from those of
            # the RTX 4090, which has the same multiprocessors.
            peak_tflops={
                "float32": 29.1,
                "tf32": 29.1,
                "bfloat16": 58.3,
                "float16": 58.3,
                "float8": 116.6,
                "int8": 233.2,
            },
            sources=(
                "NVIDIA GeForce RTX 4070 (launch specification): 5888 CUDA cores in 46 "
                "multiprocessors, boost clock, FP32 rate, 21 Gbit/s on 192 bit, 36 MB of L2",
                "derived: tensor core rates of the RTX 4090 x 46/128 x 2475/2520 MHz",
                "memory as llama.cpp prints it on Linux: 11866 MiB; others print 11874 and 11903, "
                "and Windows has 12282 MiB",
            ),
        ),
        _gpu(
            "rtx4090",
            "NVIDIA GeForce RTX 4090",
            _ada(core_count=128, clock_rate_ghz=2.52),
            memory_bytes=25250627584,
            bandwidth=1008.096e9,
            cache_bytes=75497472,
            peak_tflops={
                "float32": 82.6,
                "tf32": 82.6,
                "bfloat16": 165.2,
                "float16": 165.2,
                "float8": 330.3,
                "int8": 660.6,
            },
            sources=(
                "NVIDIA Ada GPU Architecture (whitepaper, version 2.1), appendix A: dense peak "
                "rates with FP32 accumulation. With FP16 accumulation float16 and float8 have "
                "twice these",
                "deviceQuery on Linux (driver for CUDA 13.0): multiprocessors, clock, memory, L2, "
                "bandwidth (10501 MHz, 384 bit). Older drivers report 24210 MiB, Windows 24564",
            ),
        ),
    )


def _tpus() -> tuple[Accelerator, ...]:
    no_float8 = f"{_JAX_TPU}: no float8 units"
    return (
        _tpu(
            "v5e",
            "Google TPU v5e",
            TpuFigures(
                topology="v5e", dimensions=2, devices_per_chip=1, pod_chips=256, longest_side=16
            ),
            device_gib=15.75,
            chip_bandwidth=819e9,
            chip_peak_tflops={"bfloat16": 197.0, "int8": 393.0},
            sources=(
                f"{_CLOUD_TPU}/v5e: peak rates, bandwidth, chips in a pod. Some versions of the "
                "page round the bandwidth to 800; JAX's table has 820 GB/s",
                f"{_LIBTPU}: 15.75 GiB of 16",
                no_float8,
            ),
        ),
        _tpu(
            "v5p",
            "Google TPU v5p",
            # Two cores, which the compiler joins into one device.
            TpuFigures(
                topology="v5p", dimensions=3, devices_per_chip=1, pod_chips=8960, longest_side=None
            ),
            device_gib=95.74,
            chip_bandwidth=2765e9,
            chip_peak_tflops={"bfloat16": 459.0, "int8": 918.0},
            sources=(
                f"{_CLOUD_TPU}/v5p: bfloat16 rate, bandwidth, chips in a pod. JAX's table has a "
                "bandwidth of 2460 GB/s; taken is the vendor's. For float8 the page has the rate "
                "of bfloat16",
                "How to Scale Your Model (the JAX team), TPU table, and JAX's: int8 rate",
                f"{_LIBTPU}: 95.74 GiB",
                no_float8,
            ),
        ),
        _tpu(
            "v6e",
            "Google TPU v6e (Trillium)",
            TpuFigures(
                topology="v6e", dimensions=2, devices_per_chip=1, pod_chips=256, longest_side=16
            ),
            device_gib=31.25,
            chip_bandwidth=1638e9,
            chip_peak_tflops={"bfloat16": 918.0, "int8": 1836.0},
            sources=(
                f"{_CLOUD_TPU}/v6e: peak rates, chips in a pod",
                f"{_CLOUD_TPU}/tpu7x: bandwidth; the page of the v6e has 1600 or 1640 GB/s. For "
                "float8 it has the rate of bfloat16, as JAX's table does: there are no float8 "
                "units",
                f"{_LIBTPU}: 31.25 GiB of 32",
            ),
        ),
        _tpu(
            "tpu7x",
            "Google TPU7x (Ironwood)",
            TpuFigures(
                topology="tpu7x",
                dimensions=3,
                devices_per_chip=2,
                pod_chips=9216,
                longest_side=None,
            ),
            device_gib=94.75,
            chip_bandwidth=7380e9,
            chip_peak_tflops={"bfloat16": 2307.0, "float8": 4614.0},
            sources=(
                f"{_CLOUD_TPU}/tpu7x: peak rates, bandwidth, chips in a pod, two devices a chip; "
                "a device is taken to have half of the chip's figures",
                f"{_JAX_TPU}: no int8 units",
                f"{_LIBTPU}: 94.75 GiB a device, of half of 192",
            ),
        ),
    )


ACCELERATORS: Mapping[str, Accelerator] = MappingProxyType(
    {row.name: row for row in (*_gpus(), *_tpus())}
)
"""The accelerators a target can name."""
