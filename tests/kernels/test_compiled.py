"""Compile updates for every accelerator: who computes them, memory, traffic, no collectives."""

import json
import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import halfstep
from halfstep._preflight import steps as _steps
from halfstep._preflight.target.accelerators import ACCELERATORS
from halfstep.kernels.flash_update import Leaf, Scalars, Spec, flash_update
from halfstep.quant import groups_for
from tests._rows import slow_unless
from tests.preflight._compilers import ROOT, need, own_cache as own_cache

SHAPE = (4096, 12288)
SCALARS = 2048
"""Bytes: hyperparameters and what is computed of them, each aligned to 256."""


PARAMETERS = math.prod(SHAPE)
GPUS = [name for name, row in ACCELERATORS.items() if row.platform == "cuda"]
HAS_MOSAIC = jax.__version_info__ >= (0, 12)
KERNEL = ("h100", "h200", "b200") if HAS_MOSAIC else ()
"""The GPUs that have the kernel; the others are updated by XLA."""


def compiled(target: str, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    need(ACCELERATORS[target].platform)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels._compile", target, json.dumps(cases)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "target", slow_unless([(name,) for name in GPUS], lambda name: name in ("h100", "a100-80gb"))
)
def test_every_gpu(target: str) -> None:
    one, divided = compiled(target, {"shape": SHAPE}, {"shape": SHAPE, "axes": ["data"]})
    for found in (one, divided):
        size = PARAMETERS // (1 if found is one else 4)
        small = SCALARS / size
        assert found["collectives"] == []
        if target in KERNEL:
            assert found["implementation"] == "kernel"
            assert found["peak"] <= 7.13
            assert found["temp"] <= SCALARS
            # The gradient is read, all else read and written.
            assert found["traffic"] <= 12.25 + small
        else:
            assert found["implementation"] == "XLA"
            # New scales beside the old ones: 2 bytes for each of two moments and 32 parameters.
            assert found["temp"] <= 0.125 * size + SCALARS
            assert found["peak"] <= 7.25 + small
            # The first pass reads the gradient, both moments and their scales once more and writes
            # scales; the old scales are copied.
            assert found["traffic"] <= 12.25 + 4.125 + 0.375 + small


def test_v5e() -> None:
    one, told = compiled("v5e", {"shape": SHAPE}, {"shape": SHAPE, "axes": ["data"], "told": True})
    for found in (one, told):
        # A quarter of the parameters with a program of the same size: 0.01 byte of it each.
        assert found["peak"] <= (7.13 if found is one else 7.14)
        assert found["implementation"] == "kernel"
        assert found["temp"] == 0
        assert found["collectives"] == []
        assert found["traffic"] <= 12.25 + SCALARS / PARAMETERS * 4


def arguments() -> tuple[Any, ...]:
    groups = groups_for(SHAPE)
    assert groups is not None
    scale = groups.scale_shape(SHAPE)
    shapes = (
        (SHAPE, jnp.bfloat16),
        (SHAPE, jnp.int8),
        (SHAPE, jnp.int8),
        (scale, jnp.bfloat16),
        (SHAPE, jnp.uint8),
        (scale, jnp.bfloat16),
    )
    leaf = Leaf(*(jax.ShapeDtypeStruct(*each) for each in shapes))
    by = Scalars(*[jax.ShapeDtypeStruct((), jnp.float32)] * len(Scalars._fields))
    return leaf, jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16), by


def step(leaf: Leaf, grad: Any, by: Scalars) -> Leaf:
    groups = groups_for(SHAPE)
    assert groups is not None
    return flash_update(leaf, grad, by, Spec("adam", groups))


@pytest.mark.slow
def test_preflight_takes_what_each_gpu_would(own_cache: Any) -> None:
    need("cuda")
    targets = ["h100", "a100-80gb"]
    report = halfstep.preflight(
        step, arguments(), targets=targets, donate_argnums=0, progress=False
    )
    traffic = [report[name].traffic_bytes for name in targets]
    temporaries = [report[name].temp_bytes for name in targets]
    assert None not in (*traffic, *temporaries)
    each = [(12.25, 0) if name in KERNEL else (16.75, 0.125) for name in targets]
    limits = [[part * PARAMETERS + SCALARS for part in one] for one in each]
    for found, limit in zip(zip(traffic, temporaries, strict=True), limits, strict=True):
        assert all(a is not None and a <= b for a, b in zip(found, limit, strict=True))


@pytest.mark.slow
def test_preflight_lowers_once_what_is_the_same_for_all_gpus(
    monkeypatch: pytest.MonkeyPatch, own_cache: Any
) -> None:
    need("cuda")
    lowered: list[Any] = []
    lower = _steps.lower

    def counted(*args: Any, **options: Any) -> Any:
        lowered.append(options["platform"])
        return lower(*args, **options)

    monkeypatch.setattr(_steps, "lower", counted)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    run = {"targets": ["l4", "h100"], "progress": False}
    halfstep.preflight(jnp.tanh, (x,), **run)
    assert lowered == ["cuda"]
    lowered.clear()
    halfstep.preflight(step, arguments(), **run)
    assert lowered == ["cuda", "cuda"]


def test_a_kernel_that_the_gpu_cannot_run_is_refused() -> None:
    need("cuda")
    case = {"shape": SHAPE, "implementation": "gpu"}
    (done,) = compiled("h100", case) if HAS_MOSAIC else [{"implementation": "kernel"}]
    assert done["implementation"] == "kernel"
    reason = "compute capability 9 and 10" if HAS_MOSAIC else "takes JAX 0.12 or later"
    with pytest.raises(AssertionError, match=f"{reason}.*, which takes XLA there, or 'xla'"):
        compiled("a100-80gb", case)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5p", "v6e", "tpu7x"])
def test_other_tpus(target: str) -> None:
    (found,) = compiled(target, {"shape": SHAPE})
    assert found["implementation"] == "kernel"
    assert found["peak"] <= 7.13
    assert found["temp"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_other_leaves(target: str) -> None:
    stacked, wide = compiled(
        target, {"shape": (12, 1024, 4096)}, {"shape": SHAPE, "master_bits": 32}
    )
    scales = 0 if target in ("v5e", *KERNEL) else 0.125
    assert stacked["peak"] <= 7.13 + scales
    assert wide["peak"] <= 8.13 + scales
    assert max(stacked["temp"], wide["temp"]) <= scales * PARAMETERS + SCALARS


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "a100-80gb"])
def test_leaves_without_a_kernel(target: str) -> None:
    """Groups that are not full, and columns that are not a multiple of 128."""
    for found in compiled(target, {"shape": (4095, 12288)}, {"shape": (4096, 12200)}):
        assert found["implementation"] == "XLA"
        assert found["peak"] <= 7.26
        assert found["traffic"] <= 16.76


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "a100-80gb", "v5e"])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_whatever_divides_it_nothing_is_sent(target: str, implementation: Any) -> None:
    cases = [
        {"shape": shape, "axes": axes, "implementation": implementation}
        for shape, axes in (
            (SHAPE, ["data"]),
            (SHAPE, [None, "data"]),
            ((12, 1024, 4096), ["data"]),
            ((12, 1024, 4096), [None, "data"]),
        )
    ]
    assert [found["collectives"] for found in compiled(target, *cases)] == [[]] * len(cases)


@pytest.mark.skipif(not HAS_MOSAIC, reason="the kernel for GPUs needs JAX 0.12")
def test_a_leaf_that_is_whole_on_every_device_has_the_kernel_too(own_cache: Any) -> None:
    """On a mesh with explicit axes no compiler divides it, so that nothing forbids the kernel."""
    need("cuda")
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    whole = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), arguments()
    )
    report = halfstep.preflight(
        step, placed, targets="h100:2", donate_argnums=0, gemm="library", progress=False
    )
    assert report["h100:2"].temp_bytes is not None
    assert report["h100:2"].temp_bytes <= SCALARS
