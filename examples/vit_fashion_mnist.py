"""Train a vision transformer on Fashion-MNIST in float32, bfloat16 and float16, side by side.

    python -m examples.vit_fashion_mnist
    python -m examples.vit_fashion_mnist --policy f16 --loss-scale 16777216 --steps 200
    python -m examples.vit_fashion_mnist --policy bf16 --save-every 100 --resume

The model (`_vit.py`) and the loss are written in float32. Mixed precision is in `initial_state`
(which loss scaling) and `train_step`; the rest is what any training script has: data, evaluation,
checkpoints, curves.
"""

import argparse
import contextlib
import dataclasses
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, UInt8

import halfstep
from examples._classify import positive
from examples._data import FASHION_MNIST, Dataset, load_fashion_mnist, shuffled_batches
from examples._log import Log, Record
from examples._plot import plot_curves
from examples._vit import PRESETS, Sizes, ViT
from halfstep.integrations.orbax import Checkpoints

POLICIES = ("f32", "bf16", "f16")
OUT = pathlib.Path("runs/vit_fashion_mnist")
Images = UInt8[Array | np.ndarray, "batch rows columns channels"]
Labels = Int[Array | np.ndarray, " batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides what a run computes. Two runs of one config are the same run."""

    policy: str
    seed: int
    steps: int
    sizes: Sizes
    batch: int = 128
    microbatches: int = 1
    learning_rate: float = 3e-3
    loss_scale: float = 2.0**15
    growth_period: int = 100
    log_every: int = 10
    eval_every: int = 100


class State(eqx.Module):
    """All that changes from step to step, and so all that a checkpoint holds.

    The ledger counts the steps, applied or skipped; that is the position in the data too.
    """

    model: ViT
    optimizer_state: Any
    scaling: halfstep.AbstractLossScaling
    ledger: halfstep.Ledger


def make_optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with warmup and cosine decay. Nothing here depends on the policy."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warmup_steps=max(1, steps // 10), decay_steps=steps
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.05))


def initial_state(config: Config, data: Dataset, optimizer: optax.GradientTransformation) -> State:
    """The state before the first step. Parameters and optimizer state are float32 throughout."""
    rows, columns, channels = data.train_images.shape[1:]
    key = jax.random.key(config.seed)
    model = ViT((rows, columns, channels), data.classes, **config.sizes, key=key)
    scaling = halfstep.NoLossScaling()
    if config.policy == "f16":
        # Small gradients vanish in float16, so the loss is scaled up and the gradients down again.
        # The usual growth period is 2000 steps; a run this short would never see the scale grow.
        scaling = halfstep.DynamicLossScaling(config.loss_scale, period=config.growth_period)
    return State(
        model=model,
        optimizer_state=optimizer.init(eqx.filter(model, eqx.is_inexact_array)),
        scaling=scaling,
        ledger=halfstep.Ledger(limit=50),
    )


def normalize(images: Images) -> Float[Array, "batch rows columns channels"]:
    """Bytes to floats from -1 to 1."""
    return jnp.asarray(images, jnp.float32) / 127.5 - 1


def loss(model: ViT, images: Images, labels: Labels) -> Float[Array, ""]:
    """The loss of a batch, as anybody would write it in float32."""
    logits = jax.vmap(model)(normalize(images))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


@eqx.filter_jit(donate="all-except-first")
def train_step(
    batch: tuple[Images, Labels],
    state: State,
    optimizer: optax.GradientTransformation,
    policy: str,
    microbatches: int,
) -> tuple[Float[Array, ""], State]:
    """One step, compiled as a whole. The old state's memory becomes the new state's."""
    images, labels = batch
    value, scaling, finite, grads = halfstep.filter_value_and_grad(
        loss,
        state.scaling,
        policy=policy,
        # Where there is no loss scale to protect, the check is off by default. With it a bad
        # batch is skipped and counted, in any format.
        check_finite=True,
        microbatches=microbatches,
        batch=("images", "labels"),
    )(state.model, images, labels)

    # The gradients are float32 and already unscaled: clipping and weight decay are as ever.
    def commit(trained: tuple[ViT, Any]) -> tuple[ViT, Any]:
        return halfstep.apply_gradients(trained[0], optimizer, trained[1], grads)

    trained = (state.model, state.optimizer_state)
    (model, optimizer_state), ledger = halfstep.transaction(finite, commit, trained, state.ledger)
    return value, State(model, optimizer_state, scaling, ledger)


@eqx.filter_jit
def count_correct(model: ViT, images: Images, labels: Labels, policy: str) -> Int[Array, ""]:
    """How many images the model classifies correctly, computing as it does in training."""

    def predict(model: ViT, images: Any) -> Any:
        return jnp.argmax(jax.vmap(model)(normalize(images)), axis=-1)

    return jnp.sum(halfstep.autocast(predict, policy)(model, images) == labels)


def evaluate(model: ViT, data: Dataset, policy: str, chunk: int = 1000) -> float:
    """The accuracy on the whole test set, from 0 to 1."""
    correct = 0
    for at in range(0, len(data.test_labels), chunk):
        part = slice(at, at + chunk)
        images, labels = data.test_images[part], data.test_labels[part]
        correct += int(count_correct(model, images, labels, policy))
    return correct / len(data.test_labels)


def train(
    config: Config,
    data: Dataset,
    optimizer: optax.GradientTransformation,
    out: pathlib.Path,
    *,
    save_every: int | None = None,
    resume: bool = False,
) -> list[Record]:
    """One run. It writes `out/metrics.jsonl` and `out/checkpoints`, and returns its records."""
    out.mkdir(parents=True, exist_ok=True)
    state = initial_state(config, data, optimizer)
    with contextlib.ExitStack() as stack:
        options = dataclasses.asdict(config)
        checkpoints = Checkpoints(out / "checkpoints", keep=2, options=options)
        stack.enter_context(checkpoints)
        start = checkpoints.latest() or 0
        if start and not resume:
            raise FileExistsError(
                f"{out} holds a checkpoint of step {start}: pass --resume to go on from there, or "
                "give another --out."
            )
        if start:
            start, state = checkpoints.restore(state)
        name = f"{config.policy:>4} seed {config.seed}"
        log = Log(out / "metrics.jsonl", name=name, steps=config.steps, start=start)
        stack.enter_context(log)
        batches = shuffled_batches(
            data.train_images, data.train_labels, size=config.batch, seed=config.seed, start=start
        )
        for step, batch in zip(range(start + 1, config.steps + 1), batches, strict=False):
            value, state = train_step(batch, state, optimizer, config.policy, config.microbatches)
            log.tick()
            last = step == config.steps
            evaluates = last or step % config.eval_every == 0
            if evaluates or step % config.log_every == 0:
                # Raises once nothing but skips is left, and says where to look.
                state.ledger.check(state.model, scaling=state.scaling)
                record: Record = {
                    "step": step,
                    "loss": float(value),
                    "loss_scale": float(state.scaling.loss_scaling),
                    "skipped": int(state.ledger.skipped),
                }
                if evaluates:
                    record["test_accuracy"] = evaluate(state.model, data, config.policy)
                log.write(record)
            if save_every and (last or step % save_every == 0):
                checkpoints.save(step, state)
    return log.records


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.vit_fashion_mnist",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--policy", nargs="+", choices=POLICIES, default=POLICIES, help="(all three)")
    add("--seed", nargs="+", type=int, default=[0], help="one or more, a run each (0)")
    add("--preset", choices=PRESETS, default="tiny", help="the model's sizes (tiny)")
    for size in PRESETS["tiny"]:
        add(f"--{size}", type=positive, help="instead of the preset's")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive, help="(2)")
    length.add_argument("--steps", type=positive, help="instead of epochs")
    for name, kind, text in (
        ("batch", positive, "images in a step"),
        ("microbatches", positive, "microbatches per step"),
        ("learning_rate", float, "at its highest"),
        ("loss_scale", float, "float16's first loss scale, a power of two"),
        ("growth_period", positive, "good steps in a row before the loss scale grows"),
        ("log_every", positive, "steps between records"),
        ("eval_every", positive, "steps between evaluations"),
    ):
        default = getattr(Config, name)
        add(f"--{name.replace('_', '-')}", type=kind, default=default, help=f"{text} ({default})")
    add("--save-every", type=positive, help="steps between checkpoints; without it there are none")
    add("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    add("--data", type=pathlib.Path, default=FASHION_MNIST, help=f"({FASHION_MNIST})")
    add("--out", type=pathlib.Path, default=OUT, help=f"({OUT})")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    data = load_fashion_mnist(options.data)
    steps = options.steps or (options.epochs or 2) * (len(data.train_labels) // options.batch)
    sizes = {k: getattr(options, k) or size for k, size in PRESETS[options.preset].items()}
    given = {k: v for k, v in vars(options).items() if k in Config.__dataclass_fields__}
    optimizer = make_optimizer(options.learning_rate, steps)
    runs: dict[str, list[list[Record]]] = {policy: [] for policy in options.policy}
    for policy, seed in itertools.product(runs, options.seed):
        config = Config(**{**given, "policy": policy, "seed": seed, "steps": steps, "sizes": sizes})
        out = options.out / f"{policy}-seed{seed}"
        saving = {"save_every": options.save_every, "resume": options.resume}
        runs[policy].append(train(config, data, optimizer, out, **saving))
    plot_curves(runs, options.out / "curves.png", title=f"ViT on Fashion-MNIST, {steps} steps")
    for policy, group in runs.items():
        for seed, records in zip(options.seed, group, strict=True):
            end = records[-1]
            accuracy, skipped = f"{end['test_accuracy']:.2%}", end["skipped"]
            print(f"{policy:>4}  seed {seed}  test accuracy {accuracy}  steps skipped {skipped}")
    print(f"Metrics and curves: {options.out}")


if __name__ == "__main__":
    main()
