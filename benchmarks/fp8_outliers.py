"""Which recipes train a model with massive activations, and which do not?

    python -m benchmarks.fp8_outliers --json FILE --plot PNG
    python -m benchmarks.fp8_outliers --from FILE --plot PNG
    python -m benchmarks.fp8_outliers --json FILE --resume --only bf16 nvfp4

The language model of `benchmarks.training`, smaller, whose every layer reads, beside its own
channels, a block of 128 more that hold one large number and that its weights do not look at. Large
transformers have such channels, of up to 100,000 times the usual magnitude. In bfloat16 they change
nothing. A scale that they share with others leaves no bits for those. The exit status is 1 if a bar
is missed: the recipes with scales for blocks stay within 1 % of bfloat16's final loss, and those
with scales for tensors and rows end 5 % above it. Needs `halfstep[examples]`.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from benchmarks import training
from benchmarks._report import parser
from benchmarks._resume import add_choice, earlier_runs
from benchmarks._runs import MappedTrainer
from benchmarks._tasks import Schedule, Task, python_sources
from tests.models import gpt as _gpt

MODULE = "benchmarks.fp8_outliers"
REFERENCE = "bf16"
SPOILED = ("f8", "f8-row")
"""Recipes with scales that massive activations share with all others, or with those of a row."""
ROBUST = ("f8-block", "mxfp8", "nvfp4")
NAMES = (REFERENCE, *SPOILED, *ROBUST)
BAR_PERCENT = 1.0
SPOILED_PERCENT = 5.0
MASSIVE = 2.0**17
CHANNELS = 128
"""How many there are: a block of the largest size, so that they lie in blocks of their own."""


def with_outliers(linear: _gpt.Params, x: Array) -> Array:
    """A layer that reads massive activations too, whose rows of its weight are zero."""
    weight = linear["weight"]
    massive = jnp.full((*x.shape[:-1], CHANNELS), MASSIVE, x.dtype)
    ignored = jnp.zeros((CHANNELS, weight.shape[-1]), weight.dtype)
    wide = jnp.concatenate([x, massive], axis=-1)
    return wide @ jnp.concatenate([weight, ignored]) + linear["bias"]


def spoiled(schedule: Schedule, sizes: dict[str, int], *, heads: int, **options: int) -> Task:
    """The language model with massive activations."""
    task = python_sources(schedule, sizes, heads=heads, **options)
    return dataclasses.replace(
        task,
        loss=functools.partial(_gpt.loss, heads=heads, apply=with_outliers),
        about={**task.about, "massive": MASSIVE, "massive_channels": CHANNELS},
    )


FULL = training.Plan(
    lambda: (
        spoiled(
            Schedule(steps=600, batch=12, learning_rate=2e-3),
            {"tokens": 32, "width": 128, "layers": 2},
            heads=4,
        ),
    ),
    seeds=(0, 1),
)
QUICK = training.Plan(
    lambda: (
        spoiled(
            Schedule(steps=20, batch=2, learning_rate=1e-3, chunk=10),
            {"tokens": 8, "width": 16, "layers": 1},
            heads=2,
            size=100_000,
            tested=4,
        ),
    ),
    seeds=(0,),
)


def trainer_of(task: Task, name: str) -> MappedTrainer:
    """A task in one precision."""
    return MappedTrainer(task, name)


def bar_of(name: str, loss: str) -> float | None:
    """How many percent the final loss may be away, of the recipes that are to hold."""
    return BAR_PERCENT if loss == "final" and name in ROBUST else None


def with_bars(made: dict[str, Any]) -> dict[str, Any]:
    """A report that also says whether the other recipes are as bad as they are to be."""
    bars = dict(made["bars"])
    for row in made["results"]:
        if row["policy"] in SPOILED:
            what = f"{row['task']}, {row['policy']}, final loss"
            bars[f"{what}: at least {SPOILED_PERCENT} % above {REFERENCE}"] = (
                row["final_percent"] >= SPOILED_PERCENT
            )
    return {**made, "bars": bars, "passed": all(bars.values())}


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, "The loss of a model with massive activations in 8 and 4 bits.")
    add_choice(options, NAMES)
    training.add_sources(options, drawn="the losses", quick="tiny models, twenty steps, one seed")
    given = options.parse_args(argv)
    earlier = earlier_runs(options, given)

    def make(quick: bool) -> dict[str, Any]:
        plan = QUICK if quick else FULL
        return with_bars(
            training.measure(
                plan, MODULE, NAMES, trainer_of, bar_of, only=given.only, earlier=earlier
            )
        )

    return training.finish(given, make, bar_percent=BAR_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
