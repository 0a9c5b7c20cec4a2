"""What the real compilers make of an update: memory, traffic, and nothing sent between devices."""

import json
import math
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep.kernels.flash_update import Leaf, Scalars, Spec, flash_update
from halfstep.quant import groups_for
from tests.preflight._compilers import ROOT, need

SHAPE = (4096, 12288)
SCALARS = 1024
"""Bytes: nine numbers in one array, and the alignment of each."""


def compiled(target: str, *cases: dict[str, Any]) -> list[dict[str, Any]]:
    need("cuda" if target == "h100" else "tpu")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels._compile", target, json.dumps(cases)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_h100() -> None:
    one, divided = compiled("h100", {"shape": SHAPE}, {"shape": SHAPE, "axes": ["data"]})
    for found in (one, divided):
        assert found["peak"] <= 7.13
        assert found["temp"] <= SCALARS
        assert found["collectives"] == []


def test_v5e() -> None:
    one, told = compiled("v5e", {"shape": SHAPE}, {"shape": SHAPE, "axes": ["data"], "told": True})
    for found in (one, told):
        # A quarter of the parameters with a program of the same size: 0.01 byte of it each.
        assert found["peak"] <= (7.13 if found is one else 7.14)
        assert found["temp"] == 0
        assert found["collectives"] == []


def test_traffic_of_an_h100() -> None:
    need("cuda")
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
    report = halfstep.preflight(
        lambda leaf, grad, by: flash_update(leaf, grad, by, Spec("adam", groups)),
        (leaf, jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16), by),
        targets="h100",
        donate_argnums=0,
        progress=False,
    )
    traffic = report["h100"].traffic_bytes
    assert traffic is not None
    # The gradient is read, all else read and written; and nine numbers.
    assert traffic / math.prod(SHAPE) <= 12.25 + SCALARS / math.prod(SHAPE)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["v5p", "v6e", "tpu7x"])
def test_other_tpus(target: str) -> None:
    (found,) = compiled(target, {"shape": SHAPE})
    assert found["peak"] <= 7.13
    assert found["temp"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "v5e"])
def test_other_leaves(target: str) -> None:
    stacked, wide = compiled(
        target, {"shape": (12, 1024, 4096)}, {"shape": SHAPE, "master_bits": 32}
    )
    assert stacked["peak"] <= 7.13
    assert wide["peak"] <= 8.13
    assert max(stacked["temp"], wide["temp"]) <= SCALARS


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "v5e"])
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
