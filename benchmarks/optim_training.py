"""Does training with compressed optimizers reach the loss of `optax.adamw` in float32?

    python -m benchmarks.optim_training --json FILE --plot PNG
    python -m benchmarks.optim_training --from FILE --plot PNG
    python -m benchmarks.optim_training --moment-bits 4 --json FILE

The tasks of `benchmarks.training`, for 2,000 steps with `b2=0.999`: a long memory and small changes
are what codes of 8 bits find hardest. Beside float32 parameters and `optax.adamw`, parameters are
bfloat16 with `optim.flash_adamw` and a master of 24 bits under the policy `"bf16"`. The exit status
is 1 if a bar is missed. With `--moment-bits 4`, moments are of 4 bits and the bar is half as wide;
`--steps` and `--seeds` make a shorter comparison. Needs `halfstep[examples]`.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

import optax

from benchmarks import training
from benchmarks._report import parser
from benchmarks._runs import Trainer
from benchmarks._tasks import Schedule, Task, fashion_mnist, python_sources
from halfstep import optim

MODULE = "benchmarks.optim_training"
REFERENCE = "optax.adamw, f32"
FLASH = "flash_adamw, 24 bits"
FOUR_BITS = "flash_adamw, moments of 4 bits"
"""Trained with `--moment-bits 4`."""
NAMES = (REFERENCE, FLASH)
STEPS, SEEDS = 2000, 3
BARS = {FLASH: training.BAR_PERCENT, FOUR_BITS: training.BAR_PERCENT / 2}
"""How many percent a mean loss may lie below or above float32's."""


def plan(steps: int = STEPS, seeds: int = SEEDS) -> training.Plan:
    """Both models, for so many steps, from so many seeds."""
    return training.Plan(
        lambda: (
            fashion_mnist(Schedule(steps=steps, batch=32, learning_rate=1e-3), training.VIT),
            python_sources(
                Schedule(steps=steps, batch=4, learning_rate=1e-3),
                training.GPT,
                heads=4,
                size=4_000_000,
            ),
        ),
        seeds=tuple(range(seeds)),
    )


def trainer_of(task: Task, name: str) -> Trainer:
    """A task with one of the optimizers."""
    schedule = task.schedule
    rate = optax.warmup_cosine_decay_schedule(
        0.0, schedule.learning_rate, schedule.steps // 10, schedule.steps
    )
    clip = optax.clip_by_global_norm(1.0)
    if name == REFERENCE:
        tx = optax.chain(clip, optax.adamw(rate, b2=0.999))
        return Trainer(task, "f32", optimizer=tx)
    flash = optim.flash_adamw(
        rate, b2=0.999, master_bits=24, moment_bits=4 if name == FOUR_BITS else 8
    )
    return Trainer(
        task, "bf16", optimizer=optax.chain(clip, flash), prepared=functools.partial(_low, flash)
    )


def _low(flash: optim.Transformation, model: Any) -> Any:
    return flash.prepare(model)[0]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, "The loss of two models with compressed optimizers.")
    options.add_argument("--moment-bits", type=int, default=8, choices=(8, 4))
    options.add_argument("--steps", type=int, default=STEPS, help="of each run, in fifties")
    options.add_argument("--seeds", type=int, default=SEEDS, help="runs of each model")
    training.add_sources(options, drawn="the curves", quick="tiny models, twenty steps, one seed")
    given = options.parse_args(argv)
    ours = FLASH if given.moment_bits == 8 else FOUR_BITS

    def make(quick: bool) -> dict[str, Any]:
        chosen = training.QUICK if quick else plan(given.steps, given.seeds)
        return training.measure(
            chosen, MODULE, (REFERENCE, ours), trainer_of, lambda policy, _: BARS[policy]
        )

    return training.finish(given, make, bar_percent=BARS[ours])


if __name__ == "__main__":
    sys.exit(main())
