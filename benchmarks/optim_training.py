"""Does training with compressed optimizers reach the loss of `optax.adamw` in float32?

    python -m benchmarks.optim_training --json FILE --plot PNG
    python -m benchmarks.optim_training --from FILE --plot PNG

The tasks of `benchmarks.training`, for 2,000 steps with `b2=0.999`: a long memory and small changes
are what codes of 8 bits find hardest. Beside float32 parameters and `optax.adamw`, parameters are
bfloat16 with `optim.flash_adamw` and a master of 24 bits under the policy `"bf16"`. The exit status
is 1 if a bar is missed. Needs `halfstep[examples]`.
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
NAMES = (REFERENCE, FLASH)
FULL = training.Plan(
    lambda: (
        fashion_mnist(Schedule(steps=2000, batch=32, learning_rate=1e-3), training.VIT),
        python_sources(
            Schedule(steps=2000, batch=4, learning_rate=1e-3), training.GPT, heads=4, size=4_000_000
        ),
    ),
    seeds=(0, 1, 2),
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
    flash = optim.flash_adamw(rate, b2=0.999, master_bits=24)
    return Trainer(
        task, "bf16", optimizer=optax.chain(clip, flash), prepared=functools.partial(_low, flash)
    )


def _low(flash: optim.Transformation, model: Any) -> Any:
    return flash.prepare(model)[0]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, "The loss of two models with compressed optimizers.")

    def make(quick: bool) -> dict[str, Any]:
        plan = training.QUICK if quick else FULL
        return training.measure(plan, MODULE, NAMES, trainer_of)

    return training.run(options, argv, make)


if __name__ == "__main__":
    sys.exit(main())
