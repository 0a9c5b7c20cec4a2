"""Training runs: a task in one precision, from one seed or from several at once."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array
from tqdm import tqdm

import halfstep
from benchmarks._tasks import Task


class State(NamedTuple):
    """What a step returns anew. `model` is its arrays only."""

    model: Any
    optimizer: Any
    scaling: halfstep.AbstractLossScaling
    ledger: halfstep.Ledger


def gradients(task: Task, scaling: halfstep.AbstractLossScaling, policy: str) -> Callable[..., Any]:
    """The gradient transform: the unmodified float32 loss goes in."""
    return halfstep.filter_value_and_grad(task.loss, scaling, policy=policy)


def scaling_of(policy: str, task: Task, model: Any, seed: int) -> halfstep.AbstractLossScaling:
    """Dynamic loss scaling for float16, a recipe's state if it has one, none for the others."""
    recipe = halfstep.Policy.parse(policy).recipe
    if recipe is not None and recipe.needs_state:
        key = {"key": jax.random.key(seed)} if recipe.is_random else {}
        first = task.batch(task.train, jnp.arange(task.schedule.batch))
        return recipe.init(task.loss, model, *first, policy=policy, **key)
    if policy != "f16":
        return halfstep.NoLossScaling()
    # The usual period is 2000 steps; a run this short would never see the scale grow.
    return halfstep.DynamicLossScaling(period=100)


def optimizer_of(task: Task) -> optax.GradientTransformation:
    """AdamW behind a clip; the rate rises over a tenth of the steps and falls to nothing."""
    schedule = task.schedule
    rate = optax.warmup_cosine_decay_schedule(
        0.0, schedule.learning_rate, schedule.steps // 10, schedule.steps
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95))


class Trainer:
    """A task in one precision, compiled once for all seeds."""

    def __init__(
        self,
        task: Task,
        policy: str,
        *,
        optimizer: optax.GradientTransformation | None = None,
        prepared: Callable[[Any], Any] = lambda model: model,
    ):
        self.task, self.policy, self.prepared = task, policy, prepared
        self.optimizer = optimizer or optimizer_of(task)
        self.static = eqx.partition(eqx.filter_eval_shape(task.init, jax.random.key(0)), _is_array)[
            1
        ]
        self.chunk = jax.jit(self._chunk, donate_argnums=0)
        self.test = jax.jit(self._test)

    def _chunk(self, state: State, data: Any, places: Array) -> tuple[State, Array]:
        def step(state: State, places: Array) -> tuple[State, Array]:
            model = eqx.combine(state.model, self.static)
            value, scaling, finite, grads = gradients(self.task, state.scaling, self.policy)(
                model, *self.task.batch(data, places)
            )
            model, opt_state = halfstep.optimizer_update(
                model, self.optimizer, state.optimizer, grads, finite
            )
            ledger = state.ledger.record(finite)
            return State(eqx.filter(model, eqx.is_array), opt_state, scaling, ledger), value

        return jax.lax.scan(step, state, places)

    def _test(self, model: Any, data: Any, places: Array) -> dict[str, Array]:
        # Judged in float32, whatever parameters are stored in.
        model = halfstep.cast_to_float32(eqx.combine(model, self.static))

        def one(places: Array) -> dict[str, Array]:
            batch = self.task.batch(data, places)
            found = {"held_out_loss": self.task.loss(model, *batch)}
            if self.task.correct is not None:
                found["held_out_accuracy"] = self.task.correct(model, *batch)
            return found

        return jax.tree.map(jnp.mean, jax.lax.map(one, places))

    def start(self, seed: int) -> tuple[State, np.ndarray]:
        """The state before the first step, and the places of each chunk of steps."""
        task, schedule = self.task, self.task.schedule
        model = self.prepared(eqx.filter(task.init(jax.random.key(seed)), eqx.is_array))
        whole = eqx.combine(model, self.static)
        scaling = scaling_of(self.policy, task, whole, seed)
        state = State(model, self.optimizer.init(model), scaling, halfstep.Ledger())
        shape = (schedule.steps // schedule.chunk, schedule.chunk, schedule.batch)
        return state, np.random.default_rng(seed).integers(task.places, size=shape)

    def runs(self, seeds: Sequence[int], bar: tqdm) -> list[dict[str, Any]]:
        """Train from several seeds, one after the other."""
        return [self.run(seed, bar) for seed in seeds]

    def run(self, seed: int, bar: tqdm) -> dict[str, Any]:
        """Train from a seed, which decides the initial parameters and the order of the data."""
        task, schedule = self.task, self.task.schedule
        state, order = self.start(seed)
        losses = []
        for places in order:
            state, values = self.chunk(state, task.train, places)
            losses.append(np.asarray(values))
            bar.set_postfix_str(f"{self.policy}, seed {seed}: {losses[-1].mean():.3f}")
            bar.update(schedule.chunk)
        tested = self.test(state.model, task.held_out, task.tested)
        return _found(np.concatenate(losses), state, tested)


class MappedTrainer(Trainer):
    """A task in one precision, from all seeds at once: one program that is mapped over them.

    The models are small, so that most of the time of a step is that of starting operations. LLVM
    takes minutes for random bits of products in 4 bits unless it optimizes less.
    """

    def __init__(self, task: Task, policy: str):
        super().__init__(task, policy)
        options = {"xla_backend_optimization_level": "1"}
        self.chunk = jax.jit(
            jax.vmap(self._chunk, in_axes=(0, None, 0)), donate_argnums=0, compiler_options=options
        )
        self.test = jax.jit(jax.vmap(self._test, in_axes=(0, None, None)), compiler_options=options)

    def runs(self, seeds: Sequence[int], bar: tqdm) -> list[dict[str, Any]]:
        """Train from several seeds at once."""
        task = self.task
        states, orders = zip(*map(self.start, seeds), strict=True)
        state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
        losses = []
        for places in np.stack(orders, axis=1):
            state, values = self.chunk(state, task.train, places)
            losses.append(np.asarray(values))
            bar.set_postfix_str(f"{self.policy}: {losses[-1].mean():.3f}")
            bar.update(len(seeds) * task.schedule.chunk)
        tested = self.test(state.model, task.held_out, task.tested)
        every = np.concatenate(losses, axis=1)
        return [
            _found(every[which], *jax.tree.map(lambda leaf: leaf[which], (state, tested)))  # noqa: B023
            for which in range(len(seeds))
        ]


def _found(losses: np.ndarray, state: State, tested: dict[str, Array]) -> dict[str, Any]:
    """What a run is reported by."""
    return {
        "losses": losses,
        "skipped": int(state.ledger.skipped),
        "last_skipped": int(state.ledger.last_skipped),
        "loss_scale": float(state.scaling.loss_scaling),
        **{name: float(value) for name, value in tested.items()},
    }


def _is_array(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
