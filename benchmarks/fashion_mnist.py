"""Does a model trained in 16 bits end up as good as in float32? Real data, three seeds each.

    python -m benchmarks.fashion_mnist --json FILE --plot PNG
    python -m benchmarks.fashion_mnist --from FILE --plot PNG

The transformer of `examples/vit_fashion_mnist.py` is trained on Fashion-MNIST in float32, bfloat16
and float16, from the same seeds and on the same batches, and once more in float16 from a loss scale
that is far too high. Accuracies are of the whole test set. The exit status is 1 if a bar is missed.
Accuracy is all this measures: on a CPU the time of a step says nothing about 16 bits.
"""

import dataclasses
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

# Before JAX is imported. XLA:CPU computes 16-bit arithmetic in float32 and would be free to leave
# out the rounding in between, which would flatter the 16-bit formats.
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_allow_excess_precision=false"]
)

import jax

from benchmarks._pictures import save
from benchmarks._report import add_sources, parser, read_or_make, report, write
from examples._data import FASHION_MNIST, load_fashion_mnist
from examples._log import Record
from examples._plot import draw_curves
from examples._vit import PRESETS
from examples.vit_fashion_mnist import Config, make_optimizer, train

MODULE = "benchmarks.fashion_mnist"
POLICIES = ("f32", "bf16", "f16")
FORCED_SCALE = 2.0**24
BAR_POINTS = 0.5
"""How far a 16-bit policy's mean accuracy may lie below or above float32's."""
FORCED_BAR_POINTS = 1.0
"""How far the one run from a scale too high may lie below float32's of the same seed.

Wider: one run is not a mean, and the steps it skipped are missing from its schedule.
"""


def summarize(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means, differences to float32 in points, and whether the bars are met."""
    plain = [run for run in runs if not run["forced"]]
    accuracy = {p: [100 * r["test_accuracy"] for r in plain if r["policy"] == p] for p in POLICIES}
    means = {policy: statistics.fmean(values) for policy, values in accuracy.items()}
    policies = {
        policy: {
            "test_accuracy_percent": [round(value, 2) for value in accuracy[policy]],
            "mean": round(means[policy], 3),
            "seeds_apart_points": round(max(accuracy[policy]) - min(accuracy[policy]), 2),
            "difference_to_f32_points": round(means[policy] - means["f32"], 3),
            "skipped": [run["skipped"] for run in plain if run["policy"] == policy],
        }
        for policy in POLICIES
    }
    (forced,) = (run for run in runs if run["forced"])
    (same,) = (r for r in plain if r["policy"] == "f32" and r["seed"] == forced["seed"])
    difference = 100 * (forced["test_accuracy"] - same["test_accuracy"])
    bars = {
        "bf16 within the bar": abs(means["bf16"] - means["f32"]) <= BAR_POINTS,
        "f16 within the bar": abs(means["f16"] - means["f32"]) <= BAR_POINTS,
        "forced scale: steps were skipped": forced["skipped"] > 0,
        "forced scale: every loss is finite": all(map(math.isfinite, forced["curve"]["loss"])),
        "forced scale: not below its bar": difference >= -FORCED_BAR_POINTS,
    }
    return {
        "policies": policies,
        "forced": {
            "initial_loss_scale": forced["initial_loss_scale"],
            "final_loss_scale": forced["curve"]["loss_scale"][-1],
            "skipped": forced["skipped"],
            "test_accuracy_percent": round(100 * forced["test_accuracy"], 2),
            "difference_to_f32_points": round(difference, 3),
            "bar_points": FORCED_BAR_POINTS,
        },
        "bar_points": BAR_POINTS,
        "bars": bars,
        "passed": all(bars.values()),
    }


def columns(records: Sequence[Record]) -> dict[str, list[Any]]:
    """The records of a run by column, short enough to be kept; `None` where nothing was tested."""
    return {
        "step": [record["step"] for record in records],
        "loss": [round(record["loss"], 4) for record in records],
        "loss_scale": [record["loss_scale"] for record in records],
        "skipped": [record["skipped"] for record in records],
        "test_accuracy": [record.get("test_accuracy") for record in records],
    }


def rows(curve: Mapping[str, Sequence[Any]]) -> list[Record]:
    """The records again."""
    records = [dict(zip(curve, row, strict=True)) for row in zip(*curve.values(), strict=True)]
    return [{k: v for k, v in record.items() if v is not None} for record in records]


def measure(directory: pathlib.Path, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Train every run and report on all."""
    data = load_fashion_mnist(directory)
    optimizer = make_optimizer(Config.learning_rate, steps)
    plan = [(policy, seed, False) for policy in POLICIES for seed in seeds]
    plan.append(("f16", seeds[0], True))
    settings: dict[str, Any] = {}
    runs: list[dict[str, Any]] = []
    started = time.monotonic()
    for policy, seed, forced in plan:
        config = Config(
            policy=policy,
            seed=seed,
            steps=steps,
            sizes=PRESETS["tiny"],
            loss_scale=FORCED_SCALE if forced else Config.loss_scale,
            log_every=1 if forced else 5,
            eval_every=max(1, steps // 8),
        )
        settings = dataclasses.asdict(config)
        with tempfile.TemporaryDirectory() as out:
            records = train(config, data, optimizer, pathlib.Path(out))
        runs.append(
            {
                "policy": policy,
                "seed": seed,
                "forced": forced,
                "initial_loss_scale": config.loss_scale if policy == "f16" else 1.0,
                "test_accuracy": records[-1]["test_accuracy"],
                "skipped": records[-1]["skipped"],
                "curve": columns(records),
            }
        )
    for name in ("policy", "seed", "loss_scale", "log_every"):
        del settings[name]
    results = {
        "backend": jax.default_backend(),
        "xla_flags": os.environ["XLA_FLAGS"].strip(),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "settings": settings,
        "train_images": len(data.train_labels),
        "test_images": len(data.test_labels),
        **summarize(runs),
        "runs": runs,
    }
    return report(MODULE, results, packages=("numpy",))


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """The mean curves of each policy, with the band from the lowest to the highest seed."""
    runs: dict[str, list[list[Record]]] = {policy: [] for policy in POLICIES}
    others: dict[str, list[Record]] = {}
    for run in made["runs"]:
        if run["forced"]:
            exponent = round(math.log2(run["initial_loss_scale"]))
            others[f"float16, begun at 2$^{{{exponent}}}$"] = rows(run["curve"])
        else:
            runs[run["policy"]].append(rows(run["curve"]))
    seeds = len(runs["f32"])
    title = f"ViT on Fashion-MNIST: mean of {seeds} seeds,\nband from the lowest to the highest"
    save(draw_curves(runs, title=title, others=others), path, made)


def show(made: Mapping[str, Any], file: TextIO) -> None:
    """The figures, for people."""
    lines = [
        f"{policy:>4}  {row['mean']:.2f} %  {row['difference_to_f32_points']:+.2f} points  "
        f"seeds {row['test_accuracy_percent']}  skipped {row['skipped']}"
        for policy, row in made["policies"].items()
    ]
    forced = made["forced"]
    lines.append(
        f" f16 from 2**{math.log2(forced['initial_loss_scale']):.0f}: "
        f"{forced['test_accuracy_percent']:.2f} %  {forced['difference_to_f32_points']:+.2f} points"
        f"  skipped {forced['skipped']}, scale at the end {forced['final_loss_scale']:g}"
    )
    lines += [f"{'met   ' if met else 'MISSED'}  {bar}" for bar, met in made["bars"].items()]
    print("\n".join(lines), file=file)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(MODULE, "Accuracy of a ViT in float32, bfloat16 and float16.")
    add_sources(arguments, drawn="the curves")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments.add_argument("--steps", type=int, default=400)
    arguments.add_argument("--data", type=pathlib.Path, default=FASHION_MNIST)
    options = arguments.parse_args(argv)
    made = read_or_make(options, lambda: measure(options.data, options.seeds, options.steps))
    write(made, options.json)
    if options.plot:
        plot(made, options.plot)
    show(made, sys.stderr if options.json == "-" else sys.stdout)
    return 0 if made["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
