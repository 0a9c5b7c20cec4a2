"""Entries made by hand, for tests of what is done with them."""

from typing import Any

from halfstep._preflight import (
    Collective,
    Contraction,
    Peak,
    PeakBuffer,
    PreflightEntry,
    Product,
    Roofline,
)
from halfstep._preflight.report.peak import UNLISTED

GIB = 2**30


def entry(**changes: Any) -> PreflightEntry:
    """An entry of one bfloat16 step that fits on one H100, with changes."""
    settings: dict[str, Any] = {
        "target": "h100",
        "variant": "bf16",
        "devices": 1,
        "fits": True,
        "capacity_bytes": 80 * GIB,
        "usable_bytes": 60 * GIB,
        "peak_bytes": 10 * GIB,
        "argument_bytes": 4 * GIB,
        "output_bytes": 3 * GIB,
        "alias_bytes": 3 * GIB,
        "temp_bytes": 6 * GIB,
        "memory": {
            "parameters": GIB,
            "optimizer state": 2 * GIB,
            "batch": GIB,
            "temporaries": 6 * GIB,
        },
        "contractions": (
            Contraction("bfloat16", "bfloat16", "float32", 3 * 10**12, 12),
            Contraction("float32", "float32", "float32", 10**12, 2),
        ),
        "products": (
            Product(
                "bfloat16[64,64]",
                "bfloat16[64,64]",
                "float32[64,64]",
                3 * 10**12,
                12,
                "dot",
                "a.py:1",
            ),
            Product("float32[64,8]", "float32[8,64]", "float32[64,64]", 10**12, 2, "dot", "a.py:2"),
        ),
        "f8_units": True,
        "uncounted": (),
        "collectives": (Collective("all-gather", "bfloat16", 2 * GIB, 24),),
        "traffic_bytes": 40 * GIB,
        "roofline": Roofline(compute_seconds=4e-3, memory_seconds=1e-3),
        "estimates": {},
        "gemm": "triton",
        "flags": ("--xla_gpu_autotune_level=0",),
        "versions": {"jax": "0.10.2"},
        "notes": (),
        "hlo": "HloModule step",
    }
    return PreflightEntry(**{**settings, **changes})


def peak() -> Peak:
    """A peak of 10 GiB: residuals, parameters, a dozen small temporaries, and a rest."""
    kept = PeakBuffer(
        6 * GIB, 12, "residuals", "bfloat16[8,4]", "mlp", "a.py:3", "dot_general", "f"
    )
    given = PeakBuffer(3 * GIB, 1, "parameters", "float32[4]", "", "", "params", "p")
    small = [
        PeakBuffer(2**20 * (n + 1), 1, "temporaries", "float32[2]", "", f"b.py:{n}", "add", "t")
        for n in range(12)
    ]
    listed = sum(one.bytes for one in (kept, given, *small))
    return Peak(10 * GIB, (kept, given, *small), {UNLISTED: 10 * GIB - listed}, "tanh at a.py:3")
