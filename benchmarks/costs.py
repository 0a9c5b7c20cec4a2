"""Where halfstep was behind a goal or a peer: the figure when the goal was set, and today's.

    python -m benchmarks.costs --json FILE

Most figures are those of other benchmarks, each with its peer in the same run. This one compiles
what no other does: the update of 7 billion parameters alone, and a step that releases gradients,
for eight H100s that are not there.
Nothing is run or timed here.
"""

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# Before JAX is imported: steps are traced here and compiled elsewhere.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import halfstep
from benchmarks._bars import BASELINE
from benchmarks._report import RESULTS, parser, report, table, write
from benchmarks._scale_steps import (
    RECIPES,
    Size,
    beside,
    explicit,
    model,
    placed,
    prepared,
)
from benchmarks.scale import LARGE, PACKAGES, TINY
from halfstep import optim

MODULE = "benchmarks.costs"
BY_HAND, OURS, OURS_F16 = "by hand, bf16", "halfstep, bf16", "halfstep, f16"
PLANNED = "halfstep plan"
"""How the names of steps begin whose policy is a plan."""
RELEASED = "f8, flash, release"
"""The recipe of a step."""
GIB, MIB = 2**30, 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """One figure: what it was, what it is, and what it should be."""

    what: str
    before: str
    now: float
    goal: float
    form: str = "{:.2f}"
    at_least: bool = False
    """Whether more is better."""
    benchmark: str
    limit: str = ""
    """What limits it, if the goal is missed."""
    floor: float = 0.0
    """Below this the figure does not measure what it is meant to."""

    @property
    def is_met(self) -> bool:
        """Whether the goal is met, by the figures as they are shown."""
        now, goal = (float(f"{value:.4g}") for value in (self.now, self.goal))
        if now < self.floor:
            return False
        return now >= goal if self.at_least else now <= goal


def update_alone(size: Size, target: str, devices: int, *, axes: str) -> dict[str, Any]:
    """What a compiler says of the update of all parameters, without the rest of a step."""
    decoder = model(size, devices)
    optimizer = optim.flash_adamw(1e-3)
    shapes, state = prepared(optimizer.prepare, decoder.params)
    params = placed(shapes, decoder.mesh)
    args = (params, beside(state, params), params)
    return {
        "parameters": size.count,
        "target": target,
        "axes": axes,
        **_compiled(
            lambda params, state, grads: optimizer.step(params, state, grads),
            explicit(args) if axes == "explicit" else args,
            target,
        ),
    }


def four_bits(targets: Sequence[str]) -> dict[str, Any]:
    """Bytes per parameter of one matrix with moments of 4 bits, between steps and in one."""
    optimizer, shape = optim.flash_adamw(1e-3, moment_bits=4), (4096, 12288)
    made = jax.eval_shape(optimizer.prepare, {"w": jax.ShapeDtypeStruct(shape, jnp.float32)})
    grads = {"w": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}
    peaks = {}
    for target in targets:
        found = _compiled(
            lambda params, state, grads: optimizer.step(params, state, grads),
            (*made, grads),
            target,
            gemm="auto",
        )
        peaks[target] = round(found["peak_bytes"] / math.prod(shape), 4)
    return {"stored": round(optim.stored_bytes(made) / math.prod(shape), 4), "peaks": peaks}


def released(size: Size, target: str, devices: int) -> dict[str, Any]:
    """The same of a whole step that updates each layer as soon as its gradient is there."""
    decoder = model(size, devices)
    step, args = RECIPES[RELEASED](decoder)
    saved = devices * size.examples * size.tokens * size.width * size.layers * 2
    return {
        "parameters": size.count,
        "target": target,
        "tokens": size.examples * size.tokens,
        "inputs_of_layers_bytes": saved // devices,
        **_compiled(step, args, target),
    }


def _compiled(
    step: Callable[..., Any], args: Any, target: str, *, gemm: Any = "library"
) -> dict[str, Any]:
    (entry,) = halfstep.preflight(
        step, args, targets=target, donate_argnums=(0, 1), gemm=gemm, progress=False
    ).entries
    return {"peak_bytes": entry.peak_bytes, "temporary_bytes": entry.memory.get("temporaries", 0)}


def of_overhead(result: Mapping[str, Any]) -> Iterator[Cost]:
    """The wrapper beside the step by hand."""
    rows = {row["step"]: row for row in result["rows"]}
    known: dict[str, Any] = {"benchmark": "overhead"}
    yield Cost(
        what="step time on a CPU, to the step by hand without a gate",
        before="0.97",
        now=rows["halfstep"]["time_ratio"],
        goal=1.01,
        limit="the steps of other libraries, and those by hand that check their gradients, take "
        "1.02. Runs differ by a hundredth.",
        **known,
    )
    narrow = {row["step"]: row for row in result["narrow"]["rows"]}
    for found, before, measured in ((rows, "1.17", result), (narrow, "1.24", result["narrow"])):
        yield Cost(
            what="instructions of a step, to one without a gate, ViT of width "
            f"{measured['model']['width']}",
            before=before,
            now=found["halfstep"]["instruction_ratio"],
            goal=1.15,
            limit="the loop that updates or skips holds the whole update, and XLA counts its "
            "carry.",
            **known,
        )


def of_memory(result: Mapping[str, Any]) -> Iterator[Cost]:
    """Compiled bytes beside the step by hand, and the largest batch beside mpx."""
    found = {
        (row["model"], row["target"], row["gemm"], row["batch"], row["step"]): row
        for row in result["rows"]
    }
    known: dict[str, Any] = {"benchmark": "memory"}
    small = ("desktop ViT", "h100", "library", 64)
    remat = ("GPT, remat", "h100", "library", 8)
    for key, name, before in (
        (small, "desktop ViT, batch 64", "2.29 (by hand 2.21)"),
        (remat, "GPT with remat", "82.41 (by hand 80.29)"),
    ):
        yield Cost(
            what=f"GiB of traffic, {name}, `h100`; by hand is the goal",
            before=before,
            now=found[*key, OURS]["traffic_bytes"] / GIB,
            goal=found[*key, BY_HAND]["traffic_bytes"] / GIB,
            limit="norms and softmax are in float32 here and in bfloat16 by hand.",
            **known,
        )
    v5e = ("desktop ViT", "v5e", None, 256)
    yield Cost(
        what="MiB at the peak, desktop ViT, batch 256, `v5e`; by hand is the goal",
        before="819 (by hand 810)",
        now=found[*v5e, OURS]["peak_bytes"] / MIB,
        goal=found[*v5e, BY_HAND]["peak_bytes"] / MIB,
        form="{:.0f}",
        **known,
    )
    yield Cost(
        what="GiB accessed there, by the compiler's count",
        before="14.83 (by hand 14.06)",
        now=found[*v5e, OURS]["accessed_bytes"] / GIB,
        goal=found[*v5e, BY_HAND]["accessed_bytes"] / GIB,
        **known,
    )
    v5p = ("ViT-Base", "v5p", None, 128)
    yield Cost(
        what="MiB at the peak, ViT-Base, batch 128, `v5p`; by hand is the goal",
        before="8,216",
        now=found[*v5p, OURS]["peak_bytes"] / MIB,
        goal=found[*v5p, BY_HAND]["peak_bytes"] / MIB,
        form="{:,.0f}",
        **known,
    )
    for target, gemm, before, goal, limit in (
        (
            "h100",
            "library",
            "1.06",
            1.02,
            "XLA computes the gradient of the embedding last, and keeps the logits' cotangent "
            "until then: 785 MiB. With a barrier on both gradients of each product the step takes "
            "3,236 MiB, 0.96 of the floor, but in the forms tried `jax.linear_transpose` fails.",
        ),
        (
            "v5e",
            None,
            "1.20",
            1.10,
            "all layers' weights in 16 bits, which the float32 step does not need. A barrier on "
            "both gradients of the logits' product was tried: 3,153 MiB, 1.17 of the floor, and "
            "14.30 GiB accessed instead of 14.05.",
        ),
    ):
        row = found["GPT, remat", target, gemm, 8, OURS]
        yield Cost(
            what=f"peak of GPT with remat, to its 16-bit floor, `{target}`",
            before=before,
            now=row["peak_bytes"] / row["floor_bytes"],
            goal=goal,
            limit=limit,
            **known,
        )
    largest = {row["step"]: row["batch"] for row in result["largest_batch"]}
    for step, before, limit in (
        (
            OURS_F16,
            "3,008 (mpx 3,168)",
            "XLA computes the gradients of weights last, and keeps the cotangents that they read: "
            "1,848 MiB at batch 1,024. It was 3,008 until islands on GPUs took less memory and "
            "traffic at each batch that fits: XLA does not recompute this form where it does not "
            "fit. The plan below does.",
        ),
        (
            OURS,
            "2,432 (mpx 3,168)",
            "the same. Up to a batch of 2,048 the step takes less memory than mpx's. Above it, XLA "
            "recomputes more of mpx's step.",
        ),
        (f"{PLANNED}, f16", "not measured", ""),
        (f"{PLANNED}, bf16", "not measured", ""),
    ):
        yield Cost(
            what=f"largest batch, desktop ViT, `rtx4070`, {step}; that of mpx is the goal",
            before=before,
            now=largest[step],
            goal=largest["mpx, f16"],
            form="{:,.0f}",
            at_least=True,
            limit=limit,
            **known,
        )


def of_optimizers(result: Mapping[str, Any]) -> Iterator[Cost]:
    """Bytes per parameter, gradients included."""
    name = "master(compress(optax.adamw))"
    peaks = {
        row["target"]: row["peak"]
        for row in result["rows"]
        if row["optimizer"] == name and row["target"] != "h100"
    }
    worst = max(peaks, key=lambda target: peaks[target])
    yield Cost(
        what=f"bytes per parameter at the peak of `{name}`, `{worst}`",
        before="23 to 25",
        now=peaks[worst],
        goal=8,
        benchmark="optimizers",
        limit="Optax computes the update as float32 arrays of the parameters' size. "
        "[Use `flash_adamw`](optimizers.md) where it is offered; `master` and `compress` are for "
        "optimizers that have no flash form.",
    )


def of_optim_training_4_bits(result: Mapping[str, Any]) -> Iterator[Cost]:
    """The loss with moments of 4 bits."""
    apart = [row[f"{name}_percent"] for row in result["results"] for name in ("final", "held_out")]
    yield Cost(
        what="percent between a loss with `flash_adamw(moment_bits=4)` and that with float32's "
        "AdamW, the larger of two models, final and held-out",
        before="not measured",
        now=max(map(abs, apart)),
        goal=0.25,
        benchmark="optim_training --moment-bits 4",
        limit=f"the losses are {-max(a for a in apart if a):.2f} to {-min(apart):.2f} % below "
        "those of float32. Training does not end worse, and differs by more than the goal.",
    )


def of_startup(result: Mapping[str, Any]) -> Iterator[Cost]:
    """CPU time against `import jax`."""
    rows = {row["what"]: row for row in result["rows"]}
    names = [name for name in rows if name.startswith("halfstep ")]
    slowest = max(names, key=lambda name: rows[name]["to_jax"])
    yield Cost(
        what=f"CPU time of `{slowest}`, the slowest command without work, to `import jax`",
        before="1.5",
        now=rows[slowest]["to_jax"],
        goal=0.15,
        benchmark="startup",
    )
    for name in ("import halfstep", "import halfstep; halfstep.autocast"):
        yield Cost(
            what=f"CPU time of `{name}`, to `import jax`",
            before="1.8",
            now=rows[name]["to_jax"],
            goal=1.25,
            benchmark="startup",
        )


def of_autocast(result: Mapping[str, Any]) -> Iterator[Cost]:
    """Tracing beside the bare function."""
    rows = result["programs"]
    before = {"written out": "1.48 to 1.58", "Linen": "2.05", "Pallas": "2.97"}
    for row in rows:
        name = row["program"]
        known = [figure for key, figure in before.items() if key in name]
        yield Cost(
            what=f"CPU time to trace and lower a gradient, {name}, to the bare function",
            before=known[0] if known else "not measured",
            now=row["ratio"],
            goal=1.25,
            benchmark="autocast",
            limit="every operation is decided on and traced once more than in the bare function. "
            "Layers that are equal are differentiated once; a scan has only one.",
        )
    slowest = max(rows, key=lambda row: row["explain_ratio"])
    yield Cost(
        what=f"CPU time of `explain`, {slowest['program']}, to tracing with autocast",
        before="three times",
        now=slowest["explain_ratio"],
        goal=1.3,
        benchmark="autocast",
        limit="what is stored for the backward pass is looked up in a second derivative, that of "
        "the function as it is written.",
    )


def of_debug(result: Mapping[str, Any]) -> Iterator[Cost]:
    """Searches for the first value that is not finite, and recording."""
    slowest = max(result["searches"], key=lambda row: row["ratio"])
    yield Cost(
        what=f"time of `debug.first_nonfinite` until its answer, {slowest['program']}, to "
        "compiling and running the step once",
        before="10 to 18",
        now=slowest["ratio"],
        goal=3,
        benchmark="debug",
    )
    for name, before in (("ViT", "1.12"), ("GPT", "1.14")):
        row = next(r for r in result["costs"] if (r["model"], r["sites"]) == (name, "scopes"))
        yield Cost(
            what=f"step time with recording between lines, {name}, to the bare step on a CPU",
            before=before,
            now=row["time_ratio"],
            goal=1.05,
            benchmark="debug",
            floor=BASELINE,
            limit="each recorded value is read once more, by a reduction of its own; XLA does not "
            "fuse it with what makes the value."
            if row["time_ratio"] >= BASELINE
            else "the bare step is slower than the recorded one, so that this ratio does not "
            "measure recording.",
        )


def of_costs(result: Mapping[str, Any]) -> Iterator[Cost]:
    """What is compiled here."""
    limits = {
        "explicit": "vectors that no kernel takes.",
        "automatic": "new scales of one weight next to the old ones, for both moments: over "
        "automatic axes `preflight` compiles the two passes of XLA. A process with its own GPUs "
        "divides the kernel there too.",
    }
    for found in result["updates"]:
        yield Cost(
            what=f"MiB of temporaries, `flash_adamw` of 7 B parameters, `{found['target']}`, "
            f"{found['axes']} axes",
            before="8.7 GiB",
            now=found["temporary_bytes"] / MIB,
            goal=0,
            form="{:.3f}",
            benchmark="costs",
            limit=limits[found["axes"]],
        )
    yield Cost(
        what="bytes per parameter of AdamW between steps, parameters and state, "
        "`flash_adamw(moment_bits=4)`",
        before="5.125",
        now=result["four_bits"]["stored"],
        goal=4.25,
        form="{:.3f}",
        benchmark="costs",
    )
    for target, peak in result["four_bits"]["peaks"].items():
        yield Cost(
            what=f"bytes per parameter at the peak of its step, gradients included, `{target}`",
            before="7.125",
            now=peak,
            goal=6.25,
            form="{:.3f}",
            benchmark="costs",
        )
    found = result["release"]
    yield Cost(
        what=f"GiB of temporaries, a step of 7 B parameters with `release`, {found['tokens']:,} "
        f"tokens on each device, `{found['target']}`",
        before="3.9",
        now=found["temporary_bytes"] / GIB,
        goal=1,
        benchmark="costs",
        limit=f"the inputs of all layers alone take {found['inputs_of_layers_bytes'] / GIB:.2f}, "
        "and attention that XLA writes out twice as much: the scores of one layer and their "
        "gradient. Logits, and gradients and gathered weights of one layer, take the rest.",
    )


READERS: Mapping[str, Callable[[Mapping[str, Any]], Iterator[Cost]]] = {
    "autocast": of_autocast,
    "debug": of_debug,
    "overhead": of_overhead,
    "memory": of_memory,
    "optimizers": of_optimizers,
    "optim_training_4_bits": of_optim_training_4_bits,
    "startup": of_startup,
}


def costs(result: Mapping[str, Any]) -> list[Cost]:
    """All figures: those of the other benchmarks are read from their results."""
    made = []
    for name, read in READERS.items():
        made += read(json.loads((RESULTS / f"{name}.json").read_text()))
    return [*made, *of_costs(result)]


COLUMNS = {
    "what": "what",
    "before": "before",
    "now": "now",
    "goal": "goal",
    "met": "met",
    "by": "`python -m benchmarks`",
}


def text(result: Mapping[str, Any]) -> str:
    """The table, and what limits the figures that miss their goals."""
    found = costs(result)
    rows = [
        {
            "what": one.what,
            "before": one.before,
            "now": one.form.format(one.now),
            "goal": f"{'at least ' if one.at_least else ''}{one.form.format(one.goal)}",
            "met": "yes" if one.is_met else "**no**",
            "by": f"`{one.benchmark}`",
        }
        for one in found
    ]
    missed = [f"- **{one.what}**: {one.limit}" for one in found if not one.is_met]
    said = f"{len(found) - len(missed)} of {len(found)} goals are met."
    limits = "\n".join(dict.fromkeys(missed))
    return f"{table(rows, COLUMNS)}\n\n{said}" + (
        f" What limits the rest:\n\n{limits}" * bool(missed)
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Compile the update, and print all figures."""
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--quick", action="store_true", help="a tiny model on two devices")
    given = options.parse_args(argv)
    size = (TINY, "h100:2", 2) if given.quick else (LARGE, "h100:8", 8)
    found = {
        "updates": [update_alone(*size, axes=axes) for axes in ("explicit", "automatic")],
        "release": released(*size),
        "four_bits": four_bits(("h100",) if given.quick else ("h100", "tpu7x")),
    }
    made = report(MODULE, found, packages=PACKAGES)
    write(made, given.json)
    if given.json != "-":
        print(text(made))


if __name__ == "__main__":
    main()
