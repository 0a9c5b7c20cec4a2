"""What a step keeps and moves by default, beside casts by hand and what the default owes.

    python -m benchmarks.stored --json FILE
    python -m benchmarks.stored --resume --json FILE --only GPT "desktop ViT"
    python -m benchmarks.stored --from FILE

Training steps of models, gradients of one layer of attention in 24 spellings, and models under each
preset of `jax.checkpoint` are compiled with the policy `"bf16"` and nothing else, and with casts by
hand, by XLA's own compilers for GPUs and TPUs. FILE is written after each step, and `--resume`
keeps the rows whose programs have not changed. Needs `halfstep[cuda-preflight,tpu-preflight]`.
Nothing is run.
"""

import dataclasses
import functools
import json
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks import guard  # It keeps JAX from looking for a GPU, so it comes first.

# isort: split
import jax

import halfstep
from benchmarks._attention_models import llama, mamba, spellings
from benchmarks._guard_programs import BERT_BASE, RESNET, STEPS, UNET, UNET_1, Program, written_out
from benchmarks._models import BASE, DESKTOP, GPT, Model, gpt
from benchmarks._report import add_sources, parser, report, table
from benchmarks._resume import add_choice, earlier_report
from benchmarks._steps import VARIANTS, Variant, cast_inside
from benchmarks.memory import figure, to_json

MODULE = "benchmarks.stored"
HAND = "by hand"


def _gradient(change: Callable[..., Any]) -> Variant:
    """The gradient alone: a layer is not trained."""

    def of(loss: Any) -> Any:
        def step(model: Any, opt_state: Any, scaling: Any, *batch: Any) -> Any:
            gradient = jax.grad(change(loss))(model, *batch)
            return gradient, opt_state, scaling, ()

        return step

    return Variant(of, tuple)


OURS = {"bf16": STEPS["bf16"], HAND: VARIANTS["by hand, bf16"]}
GRADIENTS = {
    "gradient, bf16": _gradient(functools.partial(halfstep.autocast, policy="bf16")),
    f"gradient, {HAND}": _gradient(cast_inside),
}
GPT_LONG = gpt("GPT of 4096 tokens", vocabulary=50_257, tokens=4096, width=768, layers=12, heads=12)
GPT_OUT = dataclasses.replace(written_out(GPT), name="GPT written out, 12 layers")
LLAMA_SIZES: Any = {"layers": 4, "width": 1024, "hidden": 2816, "vocabulary": 8192, "tokens": 1024}
LLAMA = llama("LLaMA-like", **LLAMA_SIZES)
MAMBA = mamba("Mamba-like", vocabulary=8192, tokens=512, width=512, layers=4)
PRESETS = (
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
)
GOALS: Mapping[tuple[str, str], tuple[float, float]] = MappingProxyType(
    {
        ("GPT", "h100"): (4450, 80.4),
        ("GPT of 4096 tokens", "h100"): (6700, 195),
        ("GPT written out, 12 layers", "h100"): (5200, 64.4),
        ("GPT", "v5p"): (6100, 58.5),
    }
)
"""Peak in MiB and traffic in GiB. Others owe no more than they took, or than casts by hand take."""


def remat_of_bert(preset: str) -> Model:
    """The encoder under the user's own `jax.checkpoint`."""
    policy = getattr(jax.checkpoint_policies, preset)
    loss = functools.partial(BERT_BASE.loss, remat=True, saved=policy)
    return dataclasses.replace(BERT_BASE, name=f"BERT-base, {preset}", loss=loss)


def programs() -> list[Program]:
    """All that is compiled."""
    make = functools.partial(Program, group="stored")
    targets: Mapping[tuple[Model, int], tuple[str, ...]] = {
        (GPT, 8): ("h100", "v5p"),
        (GPT_LONG, 2): ("h100",),
        (GPT_OUT, 8): ("h100",),
        (DESKTOP, 256): ("h100",),
        (BASE, 128): ("h100",),
        (UNET, 8): ("h100",),
        (UNET_1, 8): ("v5e",),
        (RESNET, 32): ("h100", "v5e"),
        (BERT_BASE, 8): ("h100", "v5e"),
        (LLAMA, 8): ("h100", "v5e"),
        (MAMBA, 8): ("h100", "v5e"),
    }
    made = [
        make(model, batch, step=step, targets=targets, steps=OURS)
        for (model, batch), targets in targets.items()
        for step in OURS
    ]
    for preset in PRESETS:
        policy = getattr(jax.checkpoint_policies, preset)
        for model in (
            llama(f"LLaMA-like, {preset}", remat=policy, **LLAMA_SIZES),
            remat_of_bert(preset),
        ):
            made += [
                make(model, 8, step=step, targets=("h100", "v5p"), steps=OURS) for step in OURS
            ]
    for model in spellings():
        made += [
            make(model, 2, step=step, targets=("h100", "v6e", "v5p"), steps=GRADIENTS)
            for step in GRADIENTS
        ]
    return made


def results(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report of rows."""
    every = {one.model.name: dict(one.model.sizes) for one in programs()}
    made = {"models": every, "optimizer": "adamw", "rows": list(rows)}
    return report(MODULE, made, packages=guard.COMPILERS[2:])


def compared(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each step of halfstep's: its figures, and as shares of those by hand."""
    found = {guard.key(row): row for row in rows}
    made: list[dict[str, Any]] = []
    for row in rows:
        if HAND in row["step"] or row.get("refused"):
            continue
        hand_key = (row["model"], row["batch"], row["target"], row["step"].replace("bf16", HAND))
        hand = found.get(hand_key) or {}
        owed = GOALS.get((row["model"], row["target"]))
        made.append(
            {
                **row,
                "peak": figure(row["peak_bytes"], 2**20, ",.0f"),
                "traffic": figure(row["traffic_bytes"], 2**30, ",.2f"),
                "tflop": format(row["flops"] / 1e12, ".3f"),
                "owed": f"{owed[0]:,.0f} / {owed[1]}" if owed else "",
                **{
                    f"by hand, {name}": f"{row[what] / hand[what]:.3f}"
                    for name, what in (
                        ("peak", "peak_bytes"),
                        ("traffic", "traffic_bytes"),
                        ("flops", "flops"),
                    )
                    if hand.get(what)
                },
            }
        )
    return made


def show(made: Mapping[str, Any]) -> str:
    """The figures, for people."""
    columns = {name: name for name in ("model", "batch", "target")}
    columns |= {"peak": "peak MiB", "traffic": "traffic GiB", "tflop": "TFLOP", "owed": "owed"}
    columns |= {f"by hand, {name}": f"{name} / hand" for name in ("peak", "traffic", "flops")}
    return table(compared(made["rows"]), columns)


def page(made: Mapping[str, Any]) -> str:
    """The table of the page on how autocast decides."""
    rows = [
        {
            **row,
            "step": f"{row['model']}, batch {row['batch']}",
            "share": f"{row['by hand, peak']}, {row['by hand, traffic']}",
        }
        for row in compared(made["rows"])
        if "by hand, peak" in row
    ]
    columns = {"step": "step", "target": "target", "peak": "peak MiB", "traffic": "traffic GiB"}
    return table(rows, {**columns, "share": "both, to casts by hand", "by hand, flops": "FLOPs"})


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, print, write."""
    every = guard.jobs(programs())
    options = parser(MODULE, __doc__ or "")
    add_sources(options)
    add_choice(options, sorted({job.program.model.name for job in every}))
    parsed = options.parse_args(argv)
    if parsed.source:
        made = json.loads(pathlib.Path(parsed.source).read_text())
    else:
        save = functools.partial(guard.save, parsed.json)
        made = guard.measure(every, parsed.only, earlier_report(options, parsed), results, save)
        save(made)
    print(to_json(made) if parsed.json == "-" else show(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
