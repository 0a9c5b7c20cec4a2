"""Products with scales of blocks on a B200: how many are native, and what they cost.

    python -m benchmarks.blocks --json FILE
    python -m benchmarks.blocks --resume --models "GPT, scan + remat" --json FILE

The gradient of three models is compiled for a B200, and that of a decoder for eight of them, on a
machine that has none. Each is compiled in bfloat16 and with the recipes whose blocks a B200
multiplies with their scales. Products are counted in the compiled program. Nothing is run. FILE is
written after every program. The exit status is 1 if a bar of native products is missed.
"""

import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# Before JAX is imported: steps are traced here and compiled elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from tqdm import tqdm

import halfstep
from benchmarks import _f8_models
from benchmarks._f8_models import Program
from benchmarks._models import BASE
from benchmarks._report import parser, report, table, write
from examples import _moe

MODULE = "benchmarks.blocks"
REFERENCE = "bf16"
POLICIES = (REFERENCE, "mxfp8", "nvfp4")
TARGET = "b200"
TRAFFIC_BARS: Mapping[str, float] = {"mxfp8": 0.75, "nvfp4": 0.65}
Row = dict[str, Any]


def mixture(*, tokens: int, width: int, layers: int, experts: int, batch: int) -> Program:
    """A mixture of experts, whose products are `ragged_dot`."""
    init = functools.partial(_moe.init, tokens=tokens, width=width, layers=layers, experts=experts)
    params = jax.eval_shape(lambda key: init(key=key), jax.random.key(0))
    text = jax.ShapeDtypeStruct((batch, tokens + 1), jnp.uint8)

    def loss(params: Any, text: Any) -> Any:
        return _moe.scores(params, text, heads=8).loss

    about = f"{layers} layers of width {width}, {experts} experts, {batch} x {tokens:,} tokens"
    return Program("mixture of experts", loss, params, (text,), about)


def programs(*, quick: bool) -> list[Program]:
    """What is compiled."""
    if quick:
        return [_on(_f8_models.dense(width=128, hidden=256, batch=256), TARGET)]
    vit = _f8_models.of("ViT-Base", BASE, 128, "batch 128")
    return [
        _on(_f8_models.dense(), TARGET),
        _on(_f8_models.scanned(), TARGET),
        _on(vit, TARGET),
        _on(mixture(tokens=1024, width=512, layers=8, experts=8, batch=16), TARGET),
        _on(_f8_models.sharded(devices=8), f"{TARGET}:8"),
    ]


def _on(program: Program, target: str) -> Program:
    return dataclasses.replace(program, target=target)


def row_of(program: Program, policy: str) -> Row:
    """What the compiler made of one program."""
    (entry,) = halfstep.preflight(
        program.step(policy),
        program.arguments(policy),
        targets=program.target,
        progress=False,
    ).entries
    found = entry.f8
    products = entry.products or ()
    asked = [product for product in products if product.of_recipe]
    made: Row = {
        "model": program.name,
        "target": program.target,
        "policy": policy,
        "native": sum(product.count for product in asked if product.in_f8),
        "eligible": sum(product.count for product in asked),
        "share_of_flops": None if found is None else found.flops,
        "peak_bytes": entry.peak_bytes,
        "traffic_bytes": entry.traffic_bytes,
        "why_not": sorted({product.why_not for product in asked if not product.in_f8}),
    }
    if entry.devices > 1:
        made["sent_bytes"] = {f"{c.kind}, {c.dtype}": c.bytes for c in entry.collectives or ()}
    return made


COLUMNS = {
    "model": "model",
    "target": "target",
    "policy": "policy",
    "native": "native products",
    "share": "of all FLOPs",
    "peak": "peak",
    "traffic": "traffic",
    "sent": "gathered and sent",
}


def lines(rows: Sequence[Row]) -> list[Row]:
    """The rows of the table, each beside bfloat16's."""
    base = _references(rows)
    made = []
    for row in rows:
        plain = base[row["model"], row["target"]]
        is_plain = row is plain
        sent = row.get("sent_bytes")
        made.append(
            {
                "model": row["model"],
                "target": f"`{row['target']}`",
                "policy": f"`{row['policy']}`",
                "native": "" if is_plain else f"{row['native']} of {row['eligible']}",
                "share": "" if is_plain else f"{row['share_of_flops']:.0%}",
                "peak": _beside(row, plain, "peak_bytes", 2**20, "{:,.0f} MiB"),
                "traffic": _beside(row, plain, "traffic_bytes", 2**30, "{:.1f} GiB"),
                "sent": "" if sent is None else f"{sum(sent.values()) / 2**20:,.0f} MiB",
            }
        )
    return made


def _references(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
    return {(row["model"], row["target"]): row for row in rows if row["policy"] == REFERENCE}


def _beside(row: Row, plain: Row, key: str, unit: int, form: str) -> str:
    shown = form.format(row[key] / unit)
    return shown if row is plain else f"{shown} ({row[key] / plain[key]:.2f})"


def bars(rows: Sequence[Row]) -> dict[str, Any]:
    """Which bars are met: every product native, less traffic, no higher a peak."""
    base = _references(rows)
    coded = [row for row in rows if row["policy"] != REFERENCE]

    def ratio(row: Row, key: str) -> float:
        return row[key] / base[row["model"], row["target"]][key]

    return {
        "programs": len(coded),
        "native": sum(row["native"] == row["eligible"] > 0 for row in coded),
        "traffic": sum(ratio(row, "traffic_bytes") <= TRAFFIC_BARS[row["policy"]] for row in coded),
        "peak": sum(ratio(row, "peak_bytes") <= 1 for row in coded),
    }


def text(made: Mapping[str, Any]) -> str:
    """The table, and which bars it meets."""
    rows, met = made["rows"], made["bars"]
    about = "; ".join(f"{name}: {said}" for name, said in made["models"].items())
    reasons = sorted({reason for row in rows for reason in row["why_not"]})
    missed = f" The others: {'; '.join(reasons)}." if reasons else ""
    shares = " and ".join(f"{bar:.2f} with `{name}`" for name, bar in TRAFFIC_BARS.items())
    return (
        f"{table(lines(rows), COLUMNS)}\n\n"
        "Gradients, compiled. In parentheses, the ratio to bfloat16. Not eligible are products of "
        f"two activations. {about}.\n\n"
        f"**Bars**, of {met['programs']} programs: all eligible products are native in "
        f"{met['native']}.{missed} Traffic is at most {shares} of bfloat16's in {met['traffic']}. "
        f"The peak is at most bfloat16's in {met['peak']}."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print, write."""
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="one small model")
    options.add_argument("--resume", action="store_true", help="go on with the run of FILE")
    options.add_argument("--models", nargs="+", metavar="NAME", help="these only")
    given = options.parse_args(argv)
    rows: list[Row] = []
    if given.resume and given.json and pathlib.Path(given.json).exists():
        rows = json.loads(pathlib.Path(given.json).read_text())["rows"]
    every = programs(quick=given.quick)
    order = [(program.name, policy) for program in every for policy in POLICIES]
    done = {(row["model"], row["policy"]) for row in rows}
    jobs = [
        (program, policy)
        for program in every
        for policy in POLICIES
        if program.name in (given.models or [program.name]) and (program.name, policy) not in done
    ]

    def result() -> dict[str, Any]:
        rows.sort(key=lambda row: order.index((row["model"], row["policy"])))
        known = {row["model"] for row in rows}
        models = {program.name: program.about for program in every if program.name in known}
        made = {"models": models, "rows": rows, "bars": bars(rows)}
        return report(MODULE, made, packages=("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"))

    bar = tqdm(jobs, unit="program")
    for program, policy in bar:
        bar.set_postfix_str(f"{program.name}, {policy}")
        rows.append(row_of(program, policy))
        if given.json and given.json != "-":
            write(result(), given.json)
    made = result()
    if given.json != "-":
        print(text(made))
    write(made, given.json)
    return made["bars"]["native"] < made["bars"]["programs"]


if __name__ == "__main__":
    sys.exit(main())
