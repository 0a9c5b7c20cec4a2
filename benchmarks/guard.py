"""Bytes of compiled training steps, to compare with those that an earlier version of halfstep took.

    python -m benchmarks.guard --json FILE
    python -m benchmarks.guard --resume --json FILE
    python -m benchmarks.guard --json NEW --compare OLD
    python -m benchmarks.guard --from NEW --compare OLD

Steps are compiled for an H100 and a TPU v5e by XLA's own compilers, with the flags that preflight
gives them. The programs are in two groups. In the group `same`, no byte may differ from an earlier
file. In the group `rounded`, values may be rounded elsewhere, and bytes may rise by at most 0.5 %.
`--compare` prints all differences from the file OLD, and exits with 1 if one of them is not
allowed. FILE is written after each step. Each row has a digest of its program as JAX lowers it, and
with `--resume`, rows of FILE whose programs have not changed are kept: equal programs are compiled
to equal bytes. Needs `halfstep[cuda-preflight,tpu-preflight]`. Nothing is run.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Before JAX is imported: steps are traced here and compiled elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from tqdm import tqdm

import halfstep
from benchmarks._guard_programs import PROGRAMS, Program
from benchmarks._report import add_sources, parser, report, table
from benchmarks._resume import add_choice, earlier_report
from benchmarks._steps import DONATED, arguments
from benchmarks.memory import cause, figure, to_json
from halfstep._preflight.preflight_errors import RefusedError

MODULE = "benchmarks.guard"
FIGURES = ("peak_bytes", "temp_bytes", "traffic_bytes", "accessed_bytes", "refused")
"""The figures that are compared. Only TPUs have a cost model that says which bytes are accessed."""
RISE = 5
"""Thousandths by which figures of the group `rounded` may rise."""
# Neither a newer Python nor a new version of halfstep should change bytes.
COMPILERS = ("jax", "jaxlib", "jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "libtpu")
PLATFORMS = {"h100": "cuda", "v5e": "tpu", "v5p": "tpu", "v6e": "tpu"}
PLACE = ("model", "batch", "target", "step")
COLUMNS = {name: name for name in ("group", *PLACE)}


@dataclasses.dataclass(frozen=True)
class Job:
    """One step that is compiled for one target."""

    program: Program
    target: str

    @property
    def key(self) -> tuple[Any, ...]:
        one = self.program
        return one.model.name, one.batch, self.target, one.step


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """The key of the job that made a row."""
    return tuple(row[name] for name in PLACE)


def jobs(programs: Sequence[Program] = PROGRAMS) -> list[Job]:
    """A job for each target of each program."""
    return [Job(program, target) for program in programs for target in program.targets]


def chosen(every: Sequence[Job], only: Sequence[str] | None) -> list[Job]:
    """The jobs of the models that are named."""
    return [job for job in every if only is None or job.program.model.name in only]


def digest(job: Job) -> str:
    """The digest of a job's program, without source lines."""
    model, step = job.program.model, job.program.variant
    function = jax.jit(step.of(model.loss), donate_argnums=DONATED)
    traced = function.trace(*arguments(step, model, job.program.batch))
    lowered = traced.lower(lowering_platforms=(PLATFORMS[job.target],))
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


def compiled(job: Job) -> dict[str, Any]:
    """The row of a job."""
    model, batch, step = job.program.model, job.program.batch, job.program.variant
    row: dict[str, Any] = {
        "group": job.program.group,
        **dict(zip(PLACE, job.key, strict=True)),
        "program": digest(job),
    }
    try:
        (entry,) = halfstep.preflight(
            step.of(model.loss),
            arguments(step, model, batch),
            targets=job.target,
            donate_argnums=DONATED,
            progress=False,
        ).entries
    except RefusedError as error:
        # A fact about this step, and no reason to lose the rows of the others.
        return {**row, "refused": cause(error)}
    accessed = entry.estimates.get("bytes accessed")
    return {
        **row,
        "gemm": entry.gemm,
        "fits": entry.fits,
        "peak_bytes": entry.peak_bytes,
        "temp_bytes": entry.temp_bytes,
        "traffic_bytes": entry.traffic_bytes,
        "accessed_bytes": None if accessed is None else int(accessed),
        "flops": sum(one.flops for one in entry.contractions or ()),
    }


def measure(
    every: Sequence[Job],
    only: Sequence[str] | None,
    earlier: Mapping[str, Any] | None,
    results: Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]],
    save: Callable[[Mapping[str, Any]], None],
) -> dict[str, Any]:
    """Compile steps.

    Args:
        every: All steps.
        only: The models of which steps are compiled; all for `None`.
        earlier: A report whose rows are kept, where their programs have not changed.
        results: Makes the report of rows.
        save: Is given the report after each step.
    """
    asked = chosen(every, only)
    programs = {job.key: digest(job) for job in asked} if earlier else {}
    kept = {
        key(row): row
        for row in (earlier or {}).get("rows", ())
        # Rows of models that are not asked for are kept as they are.
        if programs.get(key(row), row.get("program")) == row.get("program")
    }
    if earlier is not None and (other := other_compilers(earlier, results([]))):
        raise SystemExit(f"--resume keeps rows of the same compilers only; differs: {other}.")
    # Compiles for a TPU take longer, and come last.
    todo = sorted((job for job in asked if job.key not in kept), key=lambda job: job.target)
    bar = tqdm(todo, desc="compile", unit="step")
    for job in bar:
        bar.set_postfix_str(", ".join(map(str, job.key)))
        kept[job.key] = compiled(job)
        save(results([kept[job.key] for job in every if job.key in kept]))
    return results([kept[job.key] for job in every if job.key in kept])


def results(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report of rows."""
    return report(
        MODULE,
        {
            "models": {one.model.name: dict(one.model.sizes) for one in PROGRAMS},
            "optimizer": "adamw",
            "donated": "parameters, optimizer state and loss scaling",
            "groups": {"same": "no byte differs", "rounded": f"rises by at most {RISE / 1000:.1%}"},
            "rows": list(rows),
        },
        packages=COMPILERS[2:],
    )


def other_compilers(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The compilers whose versions differ, with both; empty if there are none."""
    return ", ".join(
        f"{name} {old} and {new}"
        for name in COMPILERS
        if (old := before["versions"].get(name)) != (new := after["versions"].get(name))
    )


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each figure that differs, and for each step that one of the reports lacks."""
    old, new = ({key(row): row for row in made["rows"]} for made in (before, after))
    found: list[dict[str, Any]] = []
    for one in {**old, **new}:
        row = new.get(one) or old[one]
        place = {name: row[name] for name in COLUMNS}
        if one not in old or one not in new:
            said = {"figure": "step", "before": "there", "after": "missing", "fails": "yes"}
            # A step that was added since has nothing that it could be compared with.
            added = {"before": "missing", "after": "there", "fails": "no"}
            found.append({**place, **said, **(added if one in new else {})})
            continue
        for what in FIGURES:
            was, now = old[one].get(what), new[one].get(what)
            if was != now:
                both = isinstance(was, int) and isinstance(now, int)
                fails = row["group"] == "same" or not both or (now - was) * 1000 > was * RISE
                change = f"{now / was - 1:+.3%}" if both and was else None
                found.append(
                    {
                        **place,
                        "figure": what.removesuffix("_bytes"),
                        "before": f"{was:,}" if both else was or "none",
                        "after": f"{now:,}" if both else now or "none",
                        "change": change,
                        "fails": "yes" if fails else "no",
                    }
                )
    return found


def show_differences(found: list[dict[str, Any]], count: int) -> str:
    """What differs, for people."""
    failed = sum(row["fails"] == "yes" for row in found)
    last = f"{count} steps compared: {len(found)} differences, {failed} of which fail."
    columns = {name: name for name in ("figure", "before", "after", "change", "fails")}
    return f"{table(found, {**COLUMNS, **columns})}\n\n{last}" if found else last


def show(made: Mapping[str, Any]) -> str:
    """The figures, for people."""
    units = {"peak": ("MiB", 2**20), "temp": ("MiB", 2**20)}
    units |= {"traffic": ("GiB", 2**30), "accessed": ("GiB", 2**30)}
    rows = [
        {
            **row,
            **{
                what: figure(row.get(f"{what}_bytes"), size, ",.2f")
                for what, (_, size) in units.items()
            },
        }
        for row in made["rows"]
    ]
    columns = {**COLUMNS, "gemm": "products", "refused": "refused"}
    return table(rows, {**columns, **{what: f"{what} {unit}" for what, (unit, _) in units.items()}})


def save(file: str | None, made: Mapping[str, Any]) -> None:
    """Write a report to a file, if one is named."""
    if file not in (None, "-"):
        path = pathlib.Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_json(made) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print, write, compare."""
    options = parser(MODULE, __doc__ or "")
    add_sources(options)
    add_choice(options, sorted({program.model.name for program in PROGRAMS}))
    options.add_argument("--compare", metavar="OLD", help="print what differs from this report")
    parsed = options.parse_args(argv)
    write = functools.partial(save, parsed.json)
    # OLD is read first, because FILE may be the same file.
    old = None if parsed.compare is None else json.loads(pathlib.Path(parsed.compare).read_text())
    if parsed.source:
        made = json.loads(pathlib.Path(parsed.source).read_text())
    else:
        made = measure(jobs(), parsed.only, earlier_report(options, parsed), results, write)
        write(made)
    print(to_json(made) if parsed.json == "-" else show(made))
    if old is None:
        return 0
    if other := other_compilers(old, made):
        options.error(f"{parsed.compare} was made with other compilers: {other}.")
    found = differences(old, made)
    print(show_differences(found, len(made["rows"])))
    return int(any(row["fails"] == "yes" for row in found))


if __name__ == "__main__":
    sys.exit(main())
