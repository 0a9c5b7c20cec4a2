"""Does training in 8 and 4 bits reach the loss that it reaches in bfloat16?

    python -m benchmarks.fp8_training --json FILE --plot PNG
    python -m benchmarks.fp8_training --from FILE --plot PNG

The tasks of `benchmarks.training`, smaller, for 2,000 steps: every recipe beside bfloat16, from the
same initial parameters and on the same batches. The exit status is 1 if a bar is missed: 0.25 % of
bfloat16's final loss, 1.5 % for the experimental recipe of 4 bits. Needs `halfstep[examples]`.
"""

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import training
from benchmarks._report import parser
from benchmarks._runs import Trainer
from benchmarks._tasks import Schedule, Task, fashion_mnist, python_sources
from halfstep import RECIPES

MODULE = "benchmarks.fp8_training"
REFERENCE = "bf16"
NAMES = (REFERENCE, *RECIPES)
BAR_PERCENT = 0.25
FULL = training.Plan(
    lambda: (
        fashion_mnist(
            Schedule(steps=2000, batch=32, learning_rate=1e-3),
            {"patch": 7, "width": 64, "hidden": 128, "heads": 4, "blocks": 2},
        ),
        python_sources(
            Schedule(steps=2000, batch=4, learning_rate=1e-3),
            {"tokens": 32, "width": 64, "layers": 2},
            heads=4,
        ),
    ),
    seeds=(0, 1, 2),
)


def trainer_of(task: Task, name: str) -> Trainer:
    """A task in one precision."""
    return Trainer(task, name)


def bar_of(name: str, loss: str) -> float | None:
    """How many percent the final loss may be away; the held-out one is shown only."""
    if loss != "final":
        return None
    return 1.5 if RECIPES[name].experimental else BAR_PERCENT


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, "The loss of two models in 8 and 4 bits.")

    def make(quick: bool) -> dict[str, Any]:
        plan = training.QUICK if quick else FULL
        return training.measure(plan, MODULE, NAMES, trainer_of, bar_of)

    return training.run(options, argv, make, bar_percent=BAR_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
