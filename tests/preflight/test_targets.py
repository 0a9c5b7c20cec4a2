"""The table of accelerators, a row each, and the names of targets."""

import dataclasses
import re

import pytest

from halfstep._preflight.target.accelerators import (
    ACCELERATORS,
    Accelerator,
    GpuFigures,
    TpuFigures,
)
from halfstep._preflight.target.targets import Target, parse_target

GPUS = ("h100", "h200", "a100-80gb", "a100-40gb", "b200", "l4", "rtx4070", "rtx4090")
TPUS = ("v5e", "v5p", "v6e", "tpu7x")

# GiB a device, by the vendor: the name of the product, or its documentation.
CAPACITY = {
    "h100": 80,
    "h200": 141,
    "a100-80gb": 80,
    "a100-40gb": 40,
    "b200": 180,
    "l4": 24,
    "rtx4070": 12,
    "rtx4090": 24,
    "v5e": 16,
    "v5p": 96,
    "v6e": 32,
    "tpu7x": 96,
}

# Vendors print three digits or more: of a rate that begins with a 1, half of the last is 0.5 %.
PRINTED = 0.005

PROTO_FIELDS = (
    "threads_per_block_limit",
    "threads_per_warp",
    "shared_memory_per_block",
    "shared_memory_per_core",
    "threads_per_core_limit",
    "core_count",
    "fpus_per_core",
    "block_dim_limit_x",
    "block_dim_limit_y",
    "block_dim_limit_z",
    "memory_bandwidth",
    "l2_cache_size",
    "clock_rate_ghz",
    "device_memory_size",
    "shared_memory_per_block_optin",
    "registers_per_core_limit",
    "registers_per_block_limit",
)


def gpu_figures(name: str) -> GpuFigures:
    figures = ACCELERATORS[name].figures
    assert isinstance(figures, GpuFigures)
    return figures


def device_info(name: str) -> dict[str, float]:
    """The scalar fields of the text protobuf."""
    text = parse_target(name).gpu_target_config
    info = text[text.index("{") + 1 : text.index("cuda_compute_capability")]
    return {field: float(value) for field, value in re.findall(r"(\w+): ([0-9.]+)", info)}


def test_the_table_has_what_it_promises():
    assert tuple(ACCELERATORS) == (*GPUS, *TPUS)
    assert all(name == row.name for name, row in ACCELERATORS.items())


def test_the_table_cannot_be_written():
    row = ACCELERATORS["h100"]
    with pytest.raises(TypeError, match="does not support item assignment"):
        ACCELERATORS["h100"] = row  # pyright: ignore[reportIndexIssue]
    with pytest.raises(TypeError, match="does not support item assignment"):
        row.peak_flops["bfloat16"] = 1.0  # pyright: ignore[reportIndexIssue]
    with pytest.raises(dataclasses.FrozenInstanceError, match="memory_bytes"):
        row.memory_bytes = 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("row", ACCELERATORS.values(), ids=ACCELERATORS)
class TestAccelerator:
    def test_platform(self, row: Accelerator):
        gpu = row.name in GPUS
        assert row.platform == ("cuda" if gpu else "tpu")
        assert isinstance(row.figures, GpuFigures if gpu else TpuFigures)
        assert row.tpu_dimensions == (0 if gpu else 2 if row.name in ("v5e", "v6e") else 3)
        assert (row.cache_bytes > 0) == gpu
        assert row.memory_fraction == (0.75 if gpu else 1.0)

    def test_memory_is_a_little_less_than_the_vendor_says(self, row: Accelerator):
        assert 0.9 < row.memory_bytes / (CAPACITY[row.name] * 2**30) <= 1.0

    def test_peak_rates(self, row: Accelerator):
        peaks = row.peak_flops
        assert all(rate > 1e12 for rate in peaks.values())
        if "float8" in peaks:
            assert peaks["float8"] == pytest.approx(2 * peaks["bfloat16"], rel=PRINTED)
        if "int8" in peaks:
            # Twice, or four times where accumulating in float32 is at half the rate.
            assert peaks["int8"] > 2 * peaks["bfloat16"] * (1 - PRINTED)
        if row.platform == "tpu":
            assert set(peaks) <= {"bfloat16", "float8", "int8"}
        else:
            assert peaks["float16"] == peaks["bfloat16"]
            assert peaks["tf32"] == pytest.approx(peaks["bfloat16"] / 2, rel=PRINTED)
            assert peaks["float32"] <= peaks["tf32"]
            capability = gpu_figures(row.name).cuda_compute_capability
            assert ("float8" in peaks) == (capability >= (8, 9))

    def test_ridge(self, row: Accelerator):
        """FLOPs a byte where a bfloat16 step turns from memory to compute: a hundred or several."""
        assert 100 < row.peak_flops["bfloat16"] / row.bandwidth < 600

    def test_sources(self, row: Accelerator):
        assert len(row.sources) >= 3
        assert any(source.startswith(("NVIDIA", "Google")) for source in row.sources)
        assert any("memory" in s.lower() or "available HBM" in s for s in row.sources)
        vendor = "NVIDIA" if row.platform == "cuda" else "Google"
        assert row.description.startswith(vendor)

    def test_can_be_a_key(self, row: Accelerator):
        assert {row: 1, parse_target(row.name): 2}[parse_target(row.name)] == 2


@pytest.mark.parametrize("name", GPUS)
class TestGpu:
    def test_float32_rate_is_units_times_clock(self, name: str):
        figures = gpu_figures(name)
        # A fused multiply-add is two operations.
        rate = 2e9 * figures.core_count * figures.fpus_per_core * figures.clock_rate_ghz
        # The B200 is printed with two digits, 75: half of the last is 0.7 %.
        assert rate == pytest.approx(ACCELERATORS[name].peak_flops["float32"], rel=0.0075)

    def test_limits_hold_together(self, name: str):
        figures = gpu_figures(name)
        # The system keeps 1 KiB of the shared memory of each block.
        assert figures.shared_memory_per_block_optin == figures.shared_memory_per_core - 1024
        assert figures.shared_memory_per_block < figures.shared_memory_per_block_optin
        assert figures.threads_per_core_limit % figures.threads_per_warp == 0
        assert figures.threads_per_block_limit <= figures.threads_per_core_limit

    def test_target_config_has_every_field(self, name: str):
        row, target = ACCELERATORS[name], parse_target(name)
        info = device_info(name)
        assert set(info) == set(PROTO_FIELDS)
        assert info["device_memory_size"] == row.memory_bytes
        assert info["memory_bandwidth"] == row.bandwidth
        assert info["l2_cache_size"] == row.cache_bytes
        assert info["core_count"] == gpu_figures(name).core_count
        major, minor = gpu_figures(name).cuda_compute_capability
        text = target.gpu_target_config
        assert f"cuda_compute_capability {{ major: {major} minor: {minor} }} }}" in text
        assert text.endswith(
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
            "runtime_version { major: 12 minor: 9 patch: 0 } "
            f'device_description_str: "{row.description}"'
        )
        # XLA once read cuDNN's version beside the device's fields, and now reads it among them.
        assert 'dnn_version: "9.10.0" cuda_compute_capability' in text
        assert text.count("{") == text.count("}") == 4

    def test_a_gpu_has_no_slice(self, name: str):
        with pytest.raises(ValueError, match=f"{name} is a GPU .* use `gpu_topology`"):
            _ = parse_target(name).tpu_topology
        with pytest.raises(ValueError, match=f"{name} is a GPU .* use `gpu_topology`"):
            _ = parse_target(name).tpu_chips_per_host


def test_h100_is_as_the_compiler_was_seen_to_take_it():
    """The values of the baselines that memory and traffic are compared with."""
    assert device_info("h100") == {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": 233472,
        "threads_per_core_limit": 2048,
        "core_count": 132,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": 3352320000000,
        "l2_cache_size": 52428800,
        "clock_rate_ghz": 1.98,
        "device_memory_size": 84929347584,
        "shared_memory_per_block_optin": 232448,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }


@pytest.mark.parametrize("name", TPUS)
class TestTpu:
    def test_a_device_is_its_share_of_a_chip(self, name: str):
        row, figures = ACCELERATORS[name], ACCELERATORS[name].figures
        assert isinstance(figures, TpuFigures)
        assert figures.devices_per_chip == (2 if name == "tpu7x" else 1)
        chip = {"v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "tpu7x": 2307e12}[name]
        assert row.peak_flops["bfloat16"] == chip / figures.devices_per_chip
        assert figures.longest_side in (None, 16)

    def test_a_tpu_has_no_gpu_topology(self, name: str):
        with pytest.raises(ValueError, match=f"{name} is a TPU .* use `tpu_topology`"):
            _ = parse_target(name).gpu_topology
        with pytest.raises(ValueError, match=f"{name} is a TPU .* use `tpu_topology`"):
            _ = parse_target(name).gpu_target_config

    def test_a_single_chip_needs_hosts_of_one(self, name: str):
        single = "x".join("1" * ACCELERATORS[name].tpu_dimensions)
        for text in (name, f"{name}:{single}"):
            target = parse_target(text)
            assert target.tpu_topology == f"{name}:{single}"
            assert target.tpu_chips_per_host == (1, 1, 1)
            assert target.sized == (":" in text)


@pytest.mark.parametrize(
    ("text", "name", "shape", "devices", "topology"),
    [
        ("h100", "h100", (1, 1), 1, "1x1x1"),
        ("h100:1", "h100:1", (1, 1), 1, "1x1x1"),
        ("h100:8", "h100:8", (1, 8), 8, "1x1x8"),
        ("h100:32x8", "h100:32x8", (32, 8), 256, "1x32x8"),
        ("a100-40gb:16", "a100-40gb:16", (1, 16), 16, "1x1x16"),
        ("  H100:32X8\n", "h100:32x8", (32, 8), 256, "1x32x8"),
        ("RTX4090:02", "rtx4090:2", (1, 2), 2, "1x1x2"),
        ("v5e", "v5e", (1, 1), 1, "v5e:1x1"),
        ("v5e:2x2", "v5e:2x2", (2, 2), 4, "v5e:2x2"),
        ("v5e:16x16", "v5e:16x16", (16, 16), 256, "v5e:16x16"),
        ("V6E:8x16", "v6e:8x16", (8, 16), 128, "v6e:8x16"),
        ("v5p", "v5p", (1, 1, 1), 1, "v5p:1x1x1"),
        ("v5p:2x2x1", "v5p:2x2x1", (2, 2, 1), 4, "v5p:2x2x1"),
        ("v5p:4x4x4", "v5p:4x4x4", (4, 4, 4), 64, "v5p:4x4x4"),
        ("v5p:16x20x28", "v5p:16x20x28", (16, 20, 28), 8960, "v5p:16x20x28"),
        ("tpu7x", "tpu7x", (1, 1, 1), 2, "tpu7x:1x1x1"),
        ("tpu7x:2x2x1", "tpu7x:2x2x1", (2, 2, 1), 8, "tpu7x:2x2x1"),
        ("tpu7x:2x2x3", "tpu7x:2x2x3", (2, 2, 3), 24, "tpu7x:2x2x3"),
    ],
)
def test_names(text: str, name: str, shape: tuple[int, ...], devices: int, topology: str):
    target = parse_target(text)
    assert (target.name, target.shape, target.devices) == (name, shape, devices)
    assert target.sized == (":" in text)
    assert target.memory_bytes == target.accelerator.memory_bytes
    if target.accelerator.platform == "cuda":
        assert target.gpu_topology == topology
    else:
        assert target.tpu_topology == topology
        assert (target.tpu_chips_per_host is None) == (max(shape) > 1)
    assert parse_target(target) is target
    assert parse_target(target.name) == target
    assert isinstance(target, Target)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10", "unknown accelerator 'h10'; required one of 'h100', .*, 'tpu7x'.*mean 'h100'[?]"),
        ("a100", "unknown accelerator 'a100'.*Did you mean 'a100-80gb' or 'a100-40gb'[?]"),
        ("rtx4070ti:2", "unknown accelerator 'rtx4070ti'.*Did you mean 'rtx4070'[?]"),
        ("gaudi2", r"unknown accelerator 'gaudi2'; required one of .*'tpu7x'\.$"),
        ("", r"unknown accelerator ''; required one of .*'tpu7x'\.$"),
        ("v5e-16", "unknown accelerator 'v5e-16'.*after a colon, as in 'v5e:4x4'"),
        ("h100x8", "unknown accelerator 'h100x8'.*after a colon, as in 'h100:32x8'"),
        ("h100:", "integers with x between them; got '' in 'h100:'. Write 'h100:32x8'"),
        ("h100:8x", "integers .* got '8x' in 'h100:8x'"),
        ("h100:x8", "integers .* got 'x8'"),
        ("h100:-8", "integers .* got '-8'"),
        ("h100:1.5", "integers .* got '1.5'"),
        ("h100:8:8", "integers .* got '8:8'"),
        ("h100:32 x 8", "integers .* got '32 x 8'"),
        ("h100:٨", "integers .* got '٨'"),
        ("h100:9999999", "integers .* got '9999999'"),
        ("v5p:2by2", "integers .* got '2by2' in 'v5p:2by2'. Write 'v5p:4x4x4'"),
        ("h100:0", "at least 1; got 'h100:0'. Write 'h100'"),
        ("v5e:0x2", "at least 1; got 'v5e:0x2'. Write 'v5e'"),
        ("h100:2x4x8", "GPUs .of one host. or hosts x GPUs.*'h100:2x4x8'. Write 'h100:8x8'"),
        ("h100:256", "at most 16 GPUs; 'h100:256' asks for 256 in one.*Write .*'h100:32x8'"),
        ("l4:2x20", "at most 16 GPUs; 'l4:2x20' asks for 20 in one.*Write .*'l4:5x8'"),
        ("v5e:4x4x4", "v5e has 2 dimensions.*'v5e:4x4x4' has 3. Write 'v5e:4x4'"),
        ("v5e:4", "v5e has 2 dimensions, counted in chips; 'v5e:4' has 1. Write 'v5e:4x4'"),
        ("v5p:4x4", "v5p has 3 dimensions.*'v5p:4x4' has 2. Write 'v5p:4x4x4'"),
        ("v5e:3x2", "2x2 chips.*even; got 'v5e:3x2'. Write 'v5e:4x2', or 'v5e' for one chip"),
        ("v5e:1x4", "2x2 chips.*even; got 'v5e:1x4'. Write 'v5e:2x4'"),
        ("v5p:1x1x2", "2x2 chips.*even; got 'v5p:1x1x2'. Write 'v5p:2x2x2'"),
        ("tpu7x:2x1x1", "2x2 chips.*even; got 'tpu7x:2x1x1'. Write 'tpu7x:2x2x1'"),
        ("v5e:32x32", "at most 16 chips on a side; got 'v5e:32x32'.*Write at most 'v5e:16x16'"),
        ("v6e:2x18", "at most 16 chips on a side; got 'v6e:2x18'"),
        (
            "v5p:16x20x30",
            "at most 8960 chips, which is a whole pod; .* has 9600. Write .*'v5p:4x4x4'",
        ),
        ("tpu7x:24x24x24", "at most 9216 chips.*'tpu7x:24x24x24' has 13824"),
    ],
)
def test_what_is_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_target(text)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("v5e", "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"),
        ("v6e", "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"),
        ("v5p", "2x2x1 2x2x2 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16 16x16x24"),
    ],
)
def test_the_slices_that_google_cloud_documents(name: str, sizes: str):
    for size in sizes.split():
        assert parse_target(f"{name}:{size}").tpu_topology == f"{name}:{size}"
