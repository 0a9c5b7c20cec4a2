"""Every recipe on each hardware: native or decoded products, memory, traffic and error.

    python -m benchmarks.recipes --json FILE
    python -m benchmarks.recipes --resume --targets h100 --json FILE

The gradient of a GPT is compiled with every recipe for an H100, a B200 and a TPU, on a machine that
has none of them, and compared with bfloat16's. Products are counted in the compiled program, and
nothing is run. How far a recipe's gradient is from float32's is read from the results of
`benchmarks.fp8`, which runs it on a CPU: factors are the same on all hardware. FILE is written
after every program.
"""

import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Before JAX is imported: steps are traced here and compiled elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tqdm import tqdm

import halfstep
from benchmarks import _f8_models
from benchmarks._f8_models import Program
from benchmarks._f8_tables import NAMES as FRAMEWORKS, digits
from benchmarks._report import RESULTS, parser, report, table, write
from halfstep import RECIPES

MODULE = "benchmarks.recipes"
REFERENCE = "bf16"
POLICIES = (REFERENCE, *RECIPES)
TARGETS = ("h100", "b200", "tpu7x")
Row = dict[str, Any]


def program(*, quick: bool) -> Program:
    """What is compiled."""
    if quick:
        return _f8_models.dense(width=128, hidden=256, batch=256)
    return _f8_models.scanned()


def row_of(model: Program, policy: str, target: str) -> Row:
    """What the compiler of one target made of the model with one recipe."""
    (entry,) = halfstep.preflight(
        model.step(policy), model.arguments(policy), targets=target, progress=False
    ).entries
    asked = [product for product in entry.products or () if product.of_recipe]
    # XLA's compiler for TPUs counts the bytes that a program accesses itself.
    traffic = entry.estimates.get("bytes accessed", entry.traffic_bytes)
    return {
        "policy": policy,
        "target": target,
        "native": sum(product.count for product in asked if product.in_f8),
        "eligible": sum(product.count for product in asked),
        "peak_bytes": entry.peak_bytes,
        "traffic_bytes": None if traffic is None else int(traffic),
        "why_not": sorted({product.why_not for product in asked if not product.in_f8}),
    }


def cosines() -> Mapping[str, str]:
    """The cosine between each recipe's gradient and float32's, as the page of fp8 shows it."""
    rows = json.loads((RESULTS / "fp8.json").read_text())["cosines"]
    return {
        row["policy"]: digits([value for name in FRAMEWORKS for value in row.get(name, ())])
        for row in rows
    }


COLUMNS = {
    "policy": "policy",
    "target": "compiled for",
    "products": "products in 8 or 4 bits",
    "peak": "peak",
    "traffic": "traffic",
    "cosine": "cosine of the gradient",
}


def lines(rows: Sequence[Row], found: Mapping[str, str]) -> list[Row]:
    """The rows of the table, each beside bfloat16's on the same hardware."""
    base = {row["target"]: row for row in rows if row["policy"] == REFERENCE}
    return [
        {
            "policy": f"`{row['policy']}`",
            "target": f"`{row['target']}`",
            "products": _products(row),
            "peak": _beside(row, base[row["target"]], "peak_bytes", 2**20, "{:,.0f} MiB"),
            "traffic": _beside(row, base[row["target"]], "traffic_bytes", 2**30, "{:.1f} GiB"),
            "cosine": found.get(row["policy"], ""),
        }
        for row in rows
    ]


def _products(row: Row) -> str:
    if row["policy"] == REFERENCE:
        return "none"
    native, eligible = row["native"], row["eligible"]
    said = "native" if native == eligible else "decoded" if not native else "native in part"
    return f"{said}, {native} of {eligible}"


def _beside(row: Row, plain: Row, key: str, unit: int, form: str) -> str:
    shown = form.format(row[key] / unit)
    return shown if row is plain else f"{shown} ({row[key] / plain[key]:.2f})"


def text(made: Mapping[str, Any]) -> str:
    """The table, and why products are decoded."""
    rows = made["rows"]
    reasons = sorted({reason for row in rows for reason in row["why_not"]})
    missed = f" Products are decoded because of: {'; '.join(reasons)}." if reasons else ""
    return (
        f"{table(lines(rows, cosines()), COLUMNS)}\n\n"
        f"The gradient of one model, compiled ({made['model']}). In parentheses, the ratio to "
        "bfloat16 on the same hardware. Traffic is the bytes that all kernels read and write; "
        "that of TPUs is the compiler's own count. The cosine between the gradient and float32's "
        "is the mean over the frameworks below, measured on a CPU with the same factors."
        f"{missed}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print, write."""
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="a small model, two recipes")
    options.add_argument("--resume", action="store_true", help="go on with the run of FILE")
    options.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    given = options.parse_args(argv)
    model = program(quick=given.quick)
    policies = (REFERENCE, "f8") if given.quick else POLICIES
    order = [(policy, target) for policy in policies for target in TARGETS]
    rows: list[Row] = []
    if given.resume and given.json and pathlib.Path(given.json).exists():
        rows = json.loads(pathlib.Path(given.json).read_text())["rows"]
    done = {(row["policy"], row["target"]) for row in rows}
    jobs = [pair for pair in order if pair[1] in given.targets and pair not in done]

    def result() -> dict[str, Any]:
        rows.sort(key=lambda row: order.index((row["policy"], row["target"])))
        packages = ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "libtpu")
        return report(
            MODULE, {"model": f"{model.name}: {model.about}", "rows": rows}, packages=packages
        )

    bar = tqdm(jobs, unit="program")
    for policy, target in bar:
        bar.set_postfix_str(f"{policy}, {target}")
        rows.append(row_of(model, policy, target))
        if given.json and given.json != "-":
            write(result(), given.json)
    made = result()
    if given.json != "-":
        print(text(made))
    write(made, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
