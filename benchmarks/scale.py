"""How a fully sharded training step grows with the number of devices.

    python -m benchmarks.scale --json FILE --plot PNG
    python -m benchmarks.scale --from FILE --plot PNG

Decoders of 1.1 and 7 billion parameters are compiled by XLA's own compilers for up to 8192 devices
that are not there. Needs `halfstep[cuda-preflight,tpu-preflight]`; `halfstep[plot]` for the
picture. Nothing is run or timed but the compilers.

Every finished compile is written to FILE at once, and what is there is not compiled again.
"""

import dataclasses
import json
import os
import pathlib
import re
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

# Before JAX is imported. Steps are traced here and compiled elsewhere; the GPU plugin, which brings
# the compiler, would otherwise look for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tqdm import tqdm

import halfstep
from benchmarks._report import add_sources, parser, read_or_make, report, table
from benchmarks._scale_steps import ALL, DONATED, GROUPS, RECIPES, Size, model
from benchmarks._scale_tables import sent
from halfstep._preflight import ACCELERATORS
from halfstep._preflight.preflight_errors import RefusedError
from halfstep._preflight.target.targets import parse_target

MODULE = "benchmarks.scale"
PACKAGES = ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "libtpu")
Gemm = Literal["auto", "library"]

SMALL = Size("1.1 B", layers=19, width=2048, hidden=5632, vocabulary=32000, tokens=2048, examples=2)
LARGE = Size("7 B", layers=32, width=4096, hidden=11008, vocabulary=32000, tokens=2048, examples=2)
TINY = Size("tiny", layers=2, width=256, hidden=512, vocabulary=256, tokens=128, examples=1)


@dataclasses.dataclass(frozen=True)
class Job:
    """One compile."""

    size: Size
    target: str
    layout: str
    recipe: str

    @property
    def key(self) -> tuple[str, ...]:
        return self.size.name, self.target, self.layout, self.recipe

    @property
    def devices(self) -> int:
        return parse_target(self.target).devices


@dataclasses.dataclass(frozen=True)
class Runs:
    """A model on some targets, in all recipes."""

    size: Size
    targets: tuple[str, ...]
    layout: str = ALL
    recipes: tuple[str, ...] = tuple(RECIPES)

    def jobs(self) -> Iterator[Job]:
        for target in self.targets:
            for recipe in self.recipes:
                yield Job(self.size, target, self.layout, recipe)


GPUS = ("h100:8", "h100:32x8", "h100:1024x8")
TPUS = ("v5e:16x16", "v5p:16x16x16")
FULL = tuple(
    runs
    for size in (SMALL, LARGE)
    for runs in (
        Runs(size, GPUS),
        Runs(size, GPUS[-1:], GROUPS),
        Runs(size, TPUS),
    )
)
QUICK = (
    Runs(TINY, ("h100:2",), recipes=("f32", "f8, flash")),
    Runs(TINY, ("h100:4",), recipes=("f32",)),
)


def compiled(job: Job) -> dict[str, Any]:
    """What a compiler says about one step."""
    size = job.size
    row: dict[str, Any] = {
        "model": size.name,
        "parameters": size.count,
        "target": job.target,
        "devices": job.devices,
        "layout": job.layout,
        "recipe": job.recipe,
    }
    made = model(size, job.devices, job.layout)
    step, args = RECIPES[job.recipe](made)
    on_gpu = ACCELERATORS[job.target.partition(":")[0]].platform == "cuda"
    gemm: Gemm = "library" if on_gpu else "auto"
    begin, used = time.monotonic(), processor_seconds()
    try:
        (entry,) = halfstep.preflight(
            step,
            args,
            targets=job.target,
            donate_argnums=DONATED,
            gemm=gemm,
            # An answer that was kept takes no time to compile.
            cache=False,
            progress=False,
        ).entries
    except RefusedError as error:
        # A fact about this step, and no reason to lose those of the others.
        return {**row, "refused": str(error).splitlines()[-1].strip()}
    return {
        **row,
        "mesh": dict(made.mesh.shape),
        "peak_bytes": entry.peak_bytes,
        "memory": dict(entry.memory),
        "usable_bytes": entry.usable_bytes,
        "fits": entry.fits,
        "collectives": None
        if entry.collectives is None
        else [dataclasses.asdict(found) for found in entry.collectives],
        "flops": entry.contraction_flops(),
        "compile_seconds": round(processor_seconds() - used, 1),
        "wall_seconds": round(time.monotonic() - begin, 1),
        "notes": list(entry.notes),
    }


def processor_seconds() -> float:
    """Of all compilers so far. Other work on the machine does not count, as it would in a time."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def is_chosen(job: Job, only: Sequence[str]) -> bool:
    """Whether a job has every name that was asked for; the kind of accelerator is one, too."""
    accelerator = job.target.partition(":")[0]
    return set(only) <= {*job.key, accelerator, f"{job.devices} devices"}


def key_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["model"], row["target"], row["layout"], row["recipe"]


def earlier(path: pathlib.Path | None, now: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows of an earlier run with the same compilers."""
    if path is None or not path.exists():
        return []
    old = json.loads(path.read_text())
    if old["versions"] != now:
        changed = {name for name in now if old["versions"].get(name) != now[name]}
        raise SystemExit(
            f"{path} was made with other versions of {', '.join(sorted(changed))}, and rows of two "
            "compilers cannot be compared. Add --fresh to compile everything again."
        )
    return old["rows"]


def measure(
    plan: Sequence[Runs],
    *,
    path: pathlib.Path | None = None,
    only: Sequence[str] = (),
    fresh: bool = False,
) -> dict[str, Any]:
    """All rows; those that the file has are taken from it."""
    jobs = [job for runs in plan for job in runs.jobs()]
    chosen = [job for job in jobs if is_chosen(job, only)]
    about = report(MODULE, {}, packages=PACKAGES)
    everything_anew = fresh and not only
    old = [] if everything_anew else earlier(path, about["versions"])
    found = {key_of(row): row for row in old}
    if fresh:
        for job in chosen:
            found.pop(job.key, None)

    def made() -> dict[str, Any]:
        sizes = {runs.size.name: dataclasses.asdict(runs.size) for runs in plan}
        rows = [found[job.key] for job in jobs if job.key in found]
        return {**about, "models": sizes, "rows": rows}

    waiting = [job for job in chosen if job.key not in found]
    bar = tqdm(waiting, desc="compile", unit="step")
    for job in bar:
        bar.set_postfix_str(", ".join(job.key))
        found[job.key] = compiled(job)
        if path is not None:
            save(made(), path)
    if path is not None:
        save(made(), path)
    return made()


def save(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Write a report, all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(to_json(made) + "\n")
    partial.rename(path)


def to_json(made: Mapping[str, Any]) -> str:
    """JSON with one line for each innermost part."""
    text = json.dumps(made, indent=1)
    return re.sub(r"\{([^{}]*)\}", lambda m: "{" + " ".join(m[1].split()) + "}", text)


def show(made: Mapping[str, Any]) -> str:
    """The figures, for people."""
    columns = {
        "model": "model",
        "target": "target",
        "layout": "divided over",
        "recipe": "recipe",
        "peak": "MiB a device",
        "fits": "fits",
        "sent": "sent MiB a device",
        "compile_seconds": "compiler's seconds",
    }
    rows = [
        {
            **row,
            "peak": figure(row.get("peak_bytes")) if "refused" not in row else row["refused"],
            "sent": figure(sent(row)),
        }
        for row in made["rows"]
    ]
    return table(rows, columns)


def figure(size: int | None) -> str:
    """Bytes in MiB; nothing if the compiler does not say."""
    return "" if size is None else f"{size / 2**20:,.0f}"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    options = parser(MODULE, __doc__ or "")
    add_sources(options, drawn="the figures", quick="a tiny model on up to four devices")
    options.add_argument("--fresh", action="store_true", help="compile also what FILE has")
    options.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help="only rows with this model, target, accelerator, layout, recipe or 'N devices'",
    )
    parsed = options.parse_args(argv)
    path = None if parsed.json in (None, "-") else pathlib.Path(parsed.json)
    plan = QUICK if parsed.quick else FULL
    made = read_or_make(
        parsed, lambda: measure(plan, path=path, only=parsed.only, fresh=parsed.fresh)
    )
    print(to_json(made) if parsed.json == "-" else show(made))
    if parsed.plot:
        from benchmarks._scale_figure import plot

        plot(made, parsed.plot)
    return made


if __name__ == "__main__":
    main()
