"""Does training in 8 and 4 bits reach the loss that it reaches in bfloat16?

    python -m benchmarks.fp8_training --json FILE --plot PNG
    python -m benchmarks.fp8_training --from FILE --plot PNG
    python -m benchmarks.fp8_training --json FILE --resume --only bf16 mxfp8

The tasks of `benchmarks.training`, smaller, for 2,000 steps: every recipe beside bfloat16, from the
same initial parameters and on the same batches; the three seeds are trained at once. With
`--resume`, the rows that `--only` does not name are those of FILE, and say with which JAX they were
made. The exit status is 1 if a bar is missed: 0.25 % of bfloat16's final and held-out loss; for
4 bits, 1.5 % of the final and 1 % of the held-out loss. Needs `halfstep[examples]`.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

# Before JAX is imported: `training` sets flags of XLA's.
from benchmarks import training  # isort: skip

import equinox as eqx
import jax
from jaxtyping import Array

from benchmarks._report import parser
from benchmarks._resume import add_choice, earlier_runs
from benchmarks._runs import MappedTrainer
from benchmarks._tasks import Schedule, Task, fashion_mnist, python_sources
from halfstep import RECIPES, Policy
from tests.models import gpt as _gpt, vit as _vit

MODULE = "benchmarks.fp8_training"
REFERENCE = "bf16"
KEPT = "nvfp4,scope:block1=mxfp8"
"""4 bits, and 8 bits in the last of two blocks. Head and embeddings are in 16 bits by their sizes:
49, 10 and 162 are not multiples of 16."""
NAMES = (REFERENCE, *RECIPES, KEPT)
BAR_PERCENT = 0.25
FOUR_BITS_PERCENT = {"final": 1.5, "held_out": 1.0}


class Scoped(eqx.Module):
    """A part of a model, in a scope that a policy's rules can name."""

    part: Any
    scope: str = eqx.field(static=True)

    def __call__(self, *args: Any) -> Array:
        with jax.named_scope(self.scope):
            return self.part(*args)


def _named(model: _vit.ViT) -> _vit.ViT:
    blocks = [Scoped(block, f"block{number}") for number, block in enumerate(model.blocks)]
    return eqx.tree_at(lambda model: model.blocks, model, blocks)


def vit(schedule: Schedule, sizes: dict[str, int], **options: int) -> Task:
    """The vision transformer, whose blocks are in scopes `block0` and `block1`."""
    task = fashion_mnist(schedule, sizes, **options)
    return dataclasses.replace(task, init=lambda key: _named(task.init(key)))


def gpt(schedule: Schedule, sizes: dict[str, int], *, heads: int, **options: int) -> Task:
    """The language model, whose blocks are in scopes of their own, and therefore not in a scan."""
    task = python_sources(schedule, sizes, heads=heads, **options)
    loss = functools.partial(_gpt.loss, heads=heads, scan=False, named=True)
    return dataclasses.replace(task, loss=loss)


FULL = training.Plan(
    lambda: (
        vit(
            Schedule(steps=2000, batch=32, learning_rate=1e-3),
            {"patch": 7, "width": 64, "hidden": 128, "heads": 4, "blocks": 2},
        ),
        gpt(
            Schedule(steps=2000, batch=4, learning_rate=1e-3),
            {"tokens": 32, "width": 64, "layers": 2},
            heads=4,
        ),
    ),
    seeds=(0, 1, 2),
)


QUICK = training.Plan(
    lambda: (
        vit(
            Schedule(steps=20, batch=4, learning_rate=1e-3, chunk=10),
            {"patch": 14, "width": 16, "hidden": 16, "heads": 2, "blocks": 2},
            tested=20,
        ),
        gpt(
            Schedule(steps=20, batch=2, learning_rate=1e-3, chunk=10),
            {"tokens": 8, "width": 16, "layers": 2},
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


def is_four_bits(name: str) -> bool:
    """Whether a policy has products in 4 bits."""
    recipe = Policy.parse(name).recipe
    return recipe is not None and recipe.forward[0].element == "e2m1"


def bar_of(name: str, loss: str) -> float | None:
    """How many percent a loss may be away."""
    return FOUR_BITS_PERCENT[loss] if is_four_bits(name) else BAR_PERCENT


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, "The loss of two models in 8 and 4 bits.")
    add_choice(options, NAMES)
    options.add_argument("--tasks", nargs="+", metavar="TASK", help="only tasks that begin so: ViT")
    training.add_sources(options, drawn="the losses", quick="tiny models, twenty steps, one seed")
    given = options.parse_args(argv)
    earlier = earlier_runs(options, given)

    def make(quick: bool) -> dict[str, Any]:
        plan = QUICK if quick else FULL
        if given.tasks:
            plan = dataclasses.replace(plan, only=tuple(given.tasks))
        return training.measure(
            plan, MODULE, NAMES, trainer_of, bar_of, only=given.only, earlier=earlier
        )

    return training.finish(given, make, bar_percent=BAR_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
