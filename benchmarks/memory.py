"""Memory and memory traffic of a training step in five ways: the MPX paper's Figure 1 again.

    python -m benchmarks.memory --json FILE --plot PNG
    python -m benchmarks.memory --from FILE --plot PNG

Two vision transformers are compiled for an RTX 4070 and an H100 by XLA's own GPU compiler, on a
machine that has neither, and the largest batch that fits on the RTX 4070 is looked for. Needs
`halfstep[cuda-preflight]` and mpx; `halfstep[plot]` for the picture. Nothing is run or timed:
traffic is what the kernels of the compiled program read and write, and no time.
"""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

# Before JAX is imported. Steps are traced here and compiled elsewhere; the GPU plugin, which brings
# the compiler, would otherwise look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tqdm import tqdm

import halfstep
from benchmarks._report import parser, report, table
from benchmarks._steps import DONATED, VARIANTS, arguments
from halfstep._preflight._errors import RefusedError

MODULE = "benchmarks.memory"
Gemm = Literal["library", "triton"]
REFERENCE = "f32"
SEARCHED = ("f32", "mpx, f16", "halfstep, bf16", "halfstep, f16")
"""Steps whose largest batch is looked for."""
STRIDE = 32
"""Largest batches are multiples of this."""


@dataclasses.dataclass(frozen=True)
class Model:
    """What is trained, at which batches, and who makes its matrix products."""

    name: str
    sizes: Mapping[str, int]
    batches: tuple[int, ...]
    gemms: tuple[Gemm, ...]


DESKTOP = Model(
    "desktop ViT",
    {
        "image": 32,
        "patch": 4,
        "width": 256,
        "hidden": 800,
        "heads": 8,
        "blocks": 6,
        "classes": 100,
    },
    (32, 64, 128, 256, 512),
    ("library", "triton"),
)
# Triton's products cannot be tiled without a GPU to time them on at the larger batches.
BASE = Model(
    "ViT-Base",
    {
        "image": 224,
        "patch": 16,
        "width": 768,
        "hidden": 3072,
        "heads": 12,
        "blocks": 12,
        "classes": 1000,
    },
    (16, 32, 64, 128),
    ("library",),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is compiled: models for targets, and a search for the first model's batch."""

    models: tuple[Model, ...]
    targets: tuple[str, ...]
    searched: str
    """The target of the search."""
    maximum: int
    """The largest batch that the search tries."""

    def jobs(self) -> Iterator[tuple[Model, Gemm, str, int, str]]:
        for model in self.models:
            for gemm in model.gemms:
                for target in self.targets:
                    for batch in model.batches:
                        for step in VARIANTS:
                            yield model, gemm, target, batch, step


FULL = Plan((DESKTOP, BASE), ("rtx4070", "h100"), searched="rtx4070", maximum=2**20)
SMALL = dataclasses.replace(
    DESKTOP, sizes={**DESKTOP.sizes, "blocks": 1}, batches=(32,), gemms=("library",)
)
QUICK = Plan((SMALL,), ("h100",), searched="h100", maximum=32)


def compile_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row for each step, batch, target, maker of products and model."""
    rows = []
    bar = tqdm(list(plan.jobs()), desc="compile", unit="step")
    for model, gemm, target, batch, name in bar:
        bar.set_postfix_str(f"{model.name}, {gemm}, {target}, batch {batch}, {name}")
        variant = VARIANTS[name]
        row: dict[str, Any] = {
            "model": model.name,
            "gemm": gemm,
            "target": target,
            "batch": batch,
            "step": name,
        }
        try:
            (entry,) = halfstep.preflight(
                variant.step,
                arguments(variant, model.sizes, batch),
                targets=target,
                donate_argnums=DONATED,
                gemm=gemm,
                progress=False,
            ).entries
        except RefusedError as error:
            # A fact about this step, and no reason to lose those of the others.
            rows.append({**row, "refused": cause(error)})
            continue
        rows.append(
            {
                **row,
                "peak_bytes": entry.peak_bytes,
                "traffic_bytes": entry.traffic_bytes,
                "usable_bytes": entry.usable_bytes,
                "fits": entry.fits,
                "rematerialized": rematerialized(entry.hlo),
            }
        )
    return with_ratios(rows)


def cause(error: RefusedError) -> str:
    """What the compiler itself said first."""
    said = str(error).partition("It says:\n")[2] or str(error)
    return said.splitlines()[0].strip()


def rematerialized(program: str) -> int:
    """Instructions that XLA computes a second time, because their results would not fit."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]*\.remat[\w.\-]* = ", program, re.MULTILINE))


def with_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with how many times less than the float32 step they take."""
    where = ("model", "gemm", "target", "batch")
    reference = {tuple(r[k] for k in where): r for r in rows if r["step"] == REFERENCE}
    made = []
    for row in rows:
        base = reference[tuple(row[key] for key in where)]
        ratios = {
            f"{what}_ratio": round(base[f"{what}_bytes"] / row[f"{what}_bytes"], 3)
            for what in ("peak", "traffic")
            if "refused" not in row and "refused" not in base
        }
        made.append({**row, **ratios})
    return made


def search_rows(plan: Plan) -> list[dict[str, Any]]:
    """The largest batch of the first model that fits, for each step that is searched."""
    model, target = plan.models[0], plan.searched
    rows = []
    bar = tqdm(SEARCHED, desc="largest batch", unit="step")
    for name in bar:
        variant = VARIANTS[name]

        def step_for_batch(batch: int, variant=variant, name=name) -> tuple[Any, tuple[Any, ...]]:
            bar.set_postfix_str(f"{name}, batch {batch}")
            return variant.step, arguments(variant, model.sizes, batch)

        row: dict[str, Any] = {
            "model": model.name,
            "gemm": model.gemms[0],
            "target": target,
            "step": name,
        }
        try:
            found = halfstep.preflight.largest_batch(
                step_for_batch,
                target=target,
                multiple_of=STRIDE,
                maximum=plan.maximum,
                donate_argnums=DONATED,
                gemm=model.gemms[0],
                progress=False,
            )
        except RefusedError as error:
            rows.append({**row, "refused": cause(error)})
            continue
        rows.append(
            {
                **row,
                "batch": found.batch,
                "peak_bytes": found.entry.peak_bytes,
                "usable_bytes": found.entry.usable_bytes,
                "rematerialized": rematerialized(found.entry.hlo),
                "tried": {str(batch): entry.peak_bytes for batch, entry in found.tried.items()},
            }
        )
    return rows


def measure(plan: Plan) -> dict[str, Any]:
    """All rows, with what is needed to make them again."""
    rows = compile_rows(plan)
    return report(
        MODULE,
        {
            "models": {model.name: dict(model.sizes) for model in plan.models},
            "optimizer": "adamw",
            "donated": "parameters, optimizer state and loss scaling",
            "reference": REFERENCE,
            "rows": rows,
            "largest_batch": search_rows(plan),
        },
        packages=("mixed-precision-for-JAX", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12"),
    )


def show(made: Mapping[str, Any]) -> str:
    """The figures, for people."""
    columns = {
        "model": "model",
        "gemm": "products",
        "target": "target",
        "batch": "batch",
        "step": "step",
        "peak": "peak MiB",
        "peak_ratio": "less",
        "traffic": "traffic GiB",
        "traffic_ratio": "less",
        "fits": "fits",
    }
    rows = [
        {
            **row,
            "peak": "refused" if "refused" in row else f"{row['peak_bytes'] / 2**20:.0f}",
            "traffic": "" if "refused" in row else f"{row['traffic_bytes'] / 2**30:.2f}",
        }
        for row in made["rows"]
    ]
    lines = [table(rows, columns), ""]
    for row in made["largest_batch"]:
        found = row.get("batch", f"refused: {row.get('refused')}")
        lines.append(
            f"largest batch of the {row['model']} on {row['target']}, {row['step']}: {found}"
        )
    return "\n".join(lines)


def to_json(made: Mapping[str, Any]) -> str:
    """JSON with one line for each row; there are more than a hundred."""
    text = json.dumps(made, indent=2)
    return re.sub(r"\{([^{}]*)\}", lambda m: "{" + " ".join(m[1].split()) + "}", text)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--plot", type=pathlib.Path, metavar="PNG", help="draw the figures")
    options.add_argument("--from", dest="source", metavar="FILE", help="an earlier report")
    options.add_argument(
        "--quick", action="store_true", help="one block, one batch, one target: a minute"
    )
    parsed = options.parse_args(argv)
    if parsed.source:
        made = json.loads(pathlib.Path(parsed.source).read_text())
    else:
        made = measure(QUICK if parsed.quick else FULL)
    if parsed.json == "-":
        print(to_json(made))
    else:
        print(show(made))
    if parsed.json not in (None, "-"):
        path = pathlib.Path(parsed.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(made) + "\n")
    if parsed.plot:
        from benchmarks._figure import plot

        plot(made, parsed.plot)
    return made


if __name__ == "__main__":
    main()
