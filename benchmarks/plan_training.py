"""Does training from a plan reach the loss that it reaches without one? Two models, three seeds.

    python -m benchmarks.plan_training --json FILE --plot PNG
    python -m benchmarks.plan_training --from FILE --plot PNG

The tasks of `benchmarks.training` in bfloat16: as they are, with a plan that stores 16 bits or
recomputes, and with one that may store 8 and 4 bits within a bound on the error of the gradients.
Plans are made for an H100 that is not there, and for a budget between nothing stored and
everything stored. The exit status is 1 if a bar is missed: 0.5 % of the loss without a plan.
Needs `halfstep[examples,cuda-preflight]`.
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import halfstep
from benchmarks import training
from benchmarks._report import parser
from benchmarks._runs import Trainer, optimizer_of
from benchmarks._tasks import Task

MODULE = "benchmarks.plan_training"
REFERENCE = "bf16"
BOUNDS: Mapping[str, float | None] = MappingProxyType({"plan": None, "plan, 8 and 4 bits": 0.05})
"""The most that a plan may change the gradients; `None` for one that stores no fewer than 16 bits.
"""
NAMES = (REFERENCE, *BOUNDS)
TARGET = "h100"
SHARE = 0.3
"""Where between nothing stored and everything stored the budget is."""
BATCH = 1024
"""Examples that a plan is made for: so many that activations fill the memory, as for large models.
The rules hold for any batch.
"""


class PlannedTrainer(Trainer):
    """A task with the policy of a plan."""

    def __init__(self, task: Task, plan: halfstep.MemoryPlan):
        super().__init__(task, str(plan.policy))
        self.plan = plan


def plan_of(task: Task, bound: float | None) -> halfstep.MemoryPlan:
    """A plan for a step of a task, on real batches that the bound is measured on."""
    make = functools.partial(
        halfstep.plan,
        functools.partial(_step_of, task),
        _arguments(task, jax.ShapeDtypeStruct((BATCH,), jnp.int32)),
        target=TARGET,
        donate_argnums=(0, 1),
        memory_fraction=1.0,
        gemm="library",
        progress=False,
    )
    everything = make().front[0].peak_bytes or 0
    try:
        nothing = min(found.peak_bytes or 0 for found in make(budget=everything - 1).front)
    except halfstep.DoesNotFitError:
        # Activations do not make the peak of a model this small: there is nothing to plan.
        return make()
    order = np.random.default_rng(17)
    batches = [
        _arguments(task, order.integers(task.places, size=task.schedule.batch), seed=seed)
        for seed in range(3)
    ]
    budget = int(nothing + SHARE * (everything - nothing))
    if bound is None:
        return make(budget=budget)
    return make(budget=budget, max_gradient_error=bound, batches=batches)


def _step_of(task: Task, policy: halfstep.Policy) -> Any:
    optimizer = optimizer_of(task)
    static = eqx.filter(
        eqx.filter_eval_shape(task.init, jax.random.key(0)), _is_shape, inverse=True
    )

    def step(arrays: Any, state: Any, *batch: Any) -> Any:
        model = eqx.combine(arrays, static)
        value, _, finite, grads = halfstep.filter_value_and_grad(task.loss, policy=policy)(
            model, *batch
        )
        model, state = halfstep.optimizer_update(model, optimizer, state, grads, finite)
        return eqx.filter(model, eqx.is_array), state, value

    return step


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _arguments(task: Task, places: Any, seed: int | None = None) -> tuple[Any, ...]:
    """A step's arguments, as arrays with a seed and as shapes without."""
    key = jax.random.key(seed or 0)

    def made(places: Any) -> tuple[Any, ...]:
        arrays = eqx.filter(task.init(key), eqx.is_array)
        return arrays, optimizer_of(task).init(arrays), *task.batch(task.train, places)

    return made(jnp.asarray(places)) if seed is not None else jax.eval_shape(made, places)


def trainer_of(task: Task, name: str) -> Trainer:
    """A task without a plan, or with one."""
    if name == REFERENCE:
        return Trainer(task, REFERENCE)
    return PlannedTrainer(task, plan_of(task, BOUNDS[name]))


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, "The loss of two models with and without a plan.")
    plans: list[dict[str, Any]] = []

    def noted(task: Task, name: str) -> Trainer:
        trainer = trainer_of(task, name)
        if isinstance(trainer, PlannedTrainer):
            plans.append({"task": task.name, "policy": name, **_about(trainer.plan)})
        return trainer

    def make(quick: bool) -> dict[str, Any]:
        runs = training.QUICK if quick else training.FULL
        made = training.measure(runs, MODULE, NAMES, noted)
        return {**made, "plans": plans}

    return training.run(options, argv, make)


def _about(plan: halfstep.MemoryPlan) -> dict[str, Any]:
    return {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "peak_without_bytes": plan.front[0].peak_bytes,
        "recomputed_flops": plan.recomputed_flops,
        "gradient_error": plan.gradient_error,
        "rules": [str(rule) for rule in plan.policy.stores],
    }


if __name__ == "__main__":
    sys.exit(main())
