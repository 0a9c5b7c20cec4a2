"""Memory and memory traffic of a training step in several ways: the MPX paper's Figure 1 again.

    python -m benchmarks.memory --json FILE --plot PNG
    python -m benchmarks.memory --from FILE --plot PNG
    python -m benchmarks.memory --resume --json FILE

Two vision transformers and a language model are compiled for GPUs and TPUs by XLA's own compilers,
on a machine that has none, and the largest batch that fits on an RTX 4070 is looked for, also with
a policy that `halfstep.plan` makes. With `--resume`, rows that FILE has are kept. Needs
`halfstep[cuda-preflight,tpu-preflight]` and mpx; `halfstep[plot]` for the picture. Nothing is run
or timed: traffic is what the kernels of the compiled program read and write, and no time.
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
from benchmarks._models import BASE, DESKTOP, GPT, GPT_REMAT, Model, vit
from benchmarks._report import add_sources, parser, read_or_make, report, table
from benchmarks._resume import add_resume, earlier_report
from benchmarks._steps import DONATED, VARIANTS, Variant, arguments, with_halfstep
from halfstep._preflight.preflight_errors import DoesNotFitError, RefusedError

MODULE = "benchmarks.memory"
Gemm = Literal["library", "triton"]
REFERENCE = "f32"
ON_GPU = (
    "f32",
    "by hand, bf16",
    "mpx, f16",
    "halfstep inputs, bf16",
    "halfstep, bf16",
    "halfstep, f16",
)
# A TPU computes in bfloat16; float16 is converted there.
ON_TPU = ("f32", "by hand, bf16", "halfstep, bf16")
SEARCHED = ("f32", "mpx, f16", "halfstep, bf16", "halfstep, f16")
"""Steps whose largest batch is looked for."""
PLANNED = {"halfstep plan, bf16": "bf16", "halfstep plan, f16": "f16"}
"""Steps whose policy is a plan for a batch larger than those of all other steps."""
STRIDE = 32
"""Largest batches are multiples of this."""


@dataclasses.dataclass(frozen=True)
class Runs:
    """A model for one target: at which batches, in which ways, and who makes its products."""

    model: Model
    target: str
    batches: tuple[int, ...]
    steps: tuple[str, ...]
    gemm: Gemm | None
    """`None` on a TPU, where there is one way."""


@dataclasses.dataclass(frozen=True)
class Search:
    """A search for the largest batch of a model that fits."""

    model: Model
    target: str
    gemm: Gemm
    maximum: int
    """The largest batch that is tried."""


Job = tuple[Runs, int, str]
"""What is compiled, at which batch, in which way."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that is compiled."""

    runs: tuple[Runs, ...]
    search: Search

    def jobs(self) -> Iterator[Job]:
        for runs in self.runs:
            for batch in runs.batches:
                for step in runs.steps:
                    yield runs, batch, step


# Triton's products cannot be tiled without a GPU to time them on for the larger models.
FULL = Plan(
    (
        Runs(DESKTOP, "rtx4070", (64, 128, 256), ON_GPU, "library"),
        Runs(DESKTOP, "h100", (64, 128, 256), ON_GPU, "library"),
        Runs(DESKTOP, "h100", (256,), ON_GPU, "triton"),
        Runs(BASE, "rtx4070", (32, 64, 128), ON_GPU, "library"),
        Runs(BASE, "h100", (32, 64, 128), ON_GPU, "library"),
        Runs(GPT, "h100", (8,), ON_GPU, "library"),
        Runs(GPT_REMAT, "h100", (8,), ON_GPU, "library"),
        Runs(DESKTOP, "v5e", (256,), ON_TPU, None),
        Runs(GPT, "v5e", (8,), ON_TPU, None),
        Runs(GPT_REMAT, "v5e", (8,), ON_TPU, None),
        Runs(DESKTOP, "v5p", (256,), ON_TPU, None),
        Runs(BASE, "v5p", (128,), ON_TPU, None),
    ),
    Search(DESKTOP, "rtx4070", "library", maximum=2**20),
)
SMALL = vit("one block", image=32, patch=4, width=256, hidden=800, heads=8, blocks=1, classes=100)
QUICK = Plan(
    (
        # Large enough that activations are most of it, and not the library's workspace.
        Runs(SMALL, "h100", (128,), ON_GPU, "library"),
        Runs(SMALL, "v5e", (128,), ("f32", "halfstep, bf16"), None),
    ),
    Search(SMALL, "h100", "library", maximum=32),
)


def compile_rows(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """One row for each step, batch, target, maker of products and model."""
    rows: list[dict[str, Any]] = []
    bar = tqdm(jobs, desc="compile", unit="step")
    for runs, batch, name in bar:
        bar.set_postfix_str(f"{runs.model.name}, {runs.target}, batch {batch}, {name}")
        variant = VARIANTS[name]
        row: dict[str, Any] = {
            "model": runs.model.name,
            "gemm": runs.gemm,
            "target": runs.target,
            "batch": batch,
            "step": name,
        }
        try:
            (entry,) = halfstep.preflight(
                variant.of(runs.model.loss),
                arguments(variant, runs.model, batch),
                targets=runs.target,
                donate_argnums=DONATED,
                gemm=runs.gemm or "auto",
                progress=False,
            ).entries
        except RefusedError as error:
            # A fact about this step, and no reason to lose those of the others.
            rows.append({**row, "refused": cause(error)})
            continue
        accessed = entry.estimates.get("bytes accessed")
        rows.append(
            {
                **row,
                "peak_bytes": entry.peak_bytes,
                "argument_bytes": entry.argument_bytes,
                "traffic_bytes": entry.traffic_bytes,
                "accessed_bytes": None if accessed is None else int(accessed),
                "usable_bytes": entry.usable_bytes,
                "fits": entry.fits,
                "rematerialized": rematerialized(entry.hlo),
            }
        )
    return rows


def cause(error: halfstep.PreflightError) -> str:
    """What the compiler itself said first."""
    said = str(error).partition("It says:\n")[2] or str(error)
    return said.splitlines()[0].strip()


def rematerialized(program: str) -> int:
    """Instructions that XLA computes a second time, because their results would not fit."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]*\.remat[\w.\-]* = ", program, re.MULTILINE))


def with_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with how many times less than the float32 step they take, and beside the floor.

    The floor is what the step would take if all that float32 needs beside its arguments took half.
    """
    reference = {place(row): row for row in rows if row["step"] == REFERENCE}
    made = []
    for row in rows:
        base = reference[place(row)]
        added: dict[str, Any] = {}
        for what in ("peak", "traffic", "accessed"):
            mine, other = row.get(f"{what}_bytes"), base.get(f"{what}_bytes")
            if mine is not None and other is not None:
                added[f"{what}_ratio"] = round(other / mine, 3)
        given = base.get("argument_bytes") or row.get("argument_bytes")
        if "peak_ratio" in added and given is not None:
            floor = given + (base["peak_bytes"] - given) // 2
            added |= {"floor_bytes": floor, "floor_ratio": round(row["peak_bytes"] / floor, 3)}
        made.append({**row, **added})
    return made


def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the rows have in common that are compared."""
    return tuple(row[key] for key in ("model", "gemm", "target", "batch"))


def search_rows(search: Search, kept: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
    """The largest batch that fits, for each step that is searched."""
    rows = {row["step"]: row for row in kept}
    bar = tqdm([*SEARCHED, *PLANNED], desc="largest batch", unit="step")
    for name in bar:
        if name in rows:
            continue
        row: dict[str, Any] = {
            "model": search.model.name,
            "gemm": search.gemm,
            "target": search.target,
            "step": name,
        }
        try:
            largest = max(found.get("batch", 0) for found in rows.values()) if rows else 0
            variant = planned(search, name, largest) if name in PLANNED else VARIANTS[name]
            rows[name] = row | searched(search, variant, bar)
        except (RefusedError, DoesNotFitError) as error:
            rows[name] = {**row, "refused": cause(error)}
    return [rows[name] for name in (*SEARCHED, *PLANNED)]


def planned(search: Search, name: str, largest: int) -> Variant:
    """The step with a plan for the next batch after the largest one that was found."""
    variant = VARIANTS[f"halfstep, {PLANNED[name]}"]
    plan = halfstep.plan(
        lambda policy: with_halfstep(policy)(search.model.loss),
        arguments(variant, search.model, largest + STRIDE),
        target=search.target,
        policy=PLANNED[name],
        donate_argnums=DONATED,
        gemm=search.gemm,
        progress=False,
    )
    return dataclasses.replace(variant, of=with_halfstep(plan.policy))


def searched(search: Search, variant: Variant, bar: "tqdm[str]") -> dict[str, Any]:
    """The largest batch of one step."""

    def step_for_batch(batch: int) -> tuple[Any, tuple[Any, ...]]:
        bar.set_postfix_str(f"batch {batch}")
        return variant.of(search.model.loss), arguments(variant, search.model, batch)

    found = halfstep.preflight.largest_batch(
        step_for_batch,
        target=search.target,
        multiple_of=STRIDE,
        maximum=search.maximum,
        donate_argnums=DONATED,
        gemm=search.gemm,
        progress=False,
    )
    return {
        "batch": found.batch,
        "peak_bytes": found.entry.peak_bytes,
        "usable_bytes": found.entry.usable_bytes,
        "rematerialized": rematerialized(found.entry.hlo),
        "tried": {str(batch): entry.peak_bytes for batch, entry in found.tried.items()},
    }


def measure(
    plan: Plan, only: Sequence[str] = (), earlier: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All rows, with what is needed to make them again; those of an earlier report are kept."""
    earlier = earlier or {}
    kept = {(*place(row), row["step"]): row for row in earlier.get("rows", ())}
    jobs = {
        (runs.model.name, runs.gemm, runs.target, batch, step): (runs, batch, step)
        for runs, batch, step in plan.jobs()
        if is_chosen((runs, batch, step), only)
    }
    made = compile_rows([job for key, job in jobs.items() if key not in kept])
    kept |= {(*place(row), row["step"]): row for row in made}
    rows = with_ratios([kept[key] for key in jobs])
    return report(
        MODULE,
        {
            "models": {runs.model.name: dict(runs.model.sizes) for runs in plan.runs},
            "optimizer": "adamw",
            "donated": "parameters, optimizer state and loss scaling",
            "reference": REFERENCE,
            "only": list(only),
            "rows": rows,
            "largest_batch": []
            if only
            else search_rows(plan.search, earlier.get("largest_batch", ())),
        },
        packages=(
            "mixed-precision-for-JAX",
            "jax-cuda12-plugin",
            "nvidia-cuda-nvcc-cu12",
            "libtpu",
        ),
    )


def is_chosen(job: Job, only: Sequence[str]) -> bool:
    """Whether a job is one of those that were asked for; the float32 step is always among them."""
    runs, batch, step = job
    names = {runs.model.name, runs.target, runs.gemm, f"batch {batch}"}
    steps = set(VARIANTS) & set(only)
    return set(only) - steps <= names and (not steps or step in {REFERENCE, *steps})


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
        "floor_ratio": "of floor",
        "traffic": "traffic GiB",
        "traffic_ratio": "less",
        "accessed": "accessed GiB",
        "accessed_ratio": "less",
        "fits": "fits",
    }
    rows = [
        {
            **row,
            "peak": "refused" if "refused" in row else figure(row["peak_bytes"], 2**20, ".0f"),
            "traffic": figure(row.get("traffic_bytes"), 2**30, ".2f"),
            "accessed": figure(row.get("accessed_bytes"), 2**30, ".2f"),
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


def figure(size: int | None, unit: int, form: str) -> str:
    """Bytes in a unit; nothing if the compiler does not say."""
    return "" if size is None else format(size / unit, form)


def to_json(made: Mapping[str, Any]) -> str:
    """JSON with one line for each row; there are more than a hundred."""
    text = json.dumps(made, indent=2)
    return re.sub(r"\{([^{}]*)\}", lambda m: "{" + " ".join(m[1].split()) + "}", text)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(MODULE, __doc__ or "")
    quick = "one block, one batch, two targets: a minute or two"
    add_sources(options, drawn="the figures", quick=quick)
    options.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="only rows with this model, target, maker of products, 'batch N' or step, and f32",
    )
    add_resume(options)
    parsed = options.parse_args(argv)
    plan = QUICK if parsed.quick else FULL
    earlier = earlier_report(options, parsed)
    made = read_or_make(parsed, lambda: measure(plan, parsed.only, earlier))
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
