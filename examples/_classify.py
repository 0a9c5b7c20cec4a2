"""What the short examples on Fashion-MNIST share: their options, the loop, and the picture.

An example brings a function that makes a `Task`: a state, a step and a prediction. `main` does the
rest, for one policy after the other.
"""

import argparse
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, UInt8

import halfstep
from examples._data import FASHION_MNIST, Dataset, load_fashion_mnist, shuffled_batches
from examples._log import Log, Record
from examples._plot import STYLES, plot_curves

Images = Float32[Array, "batch rows columns channels"]
Labels = Int[Array, " batch"]
State = dict[str, Any]
"""All that changes from step to step. `"scaling"` and `"ledger"` are in it."""


class Task(NamedTuple):
    """The parts of an example.

    Attributes:
        state: Before the first step.
        step: Takes a state, images and labels; returns the loss and the next state.
        predict: Takes a state and images; returns a label for each.
    """

    state: State
    step: Callable[[State, Images, Labels], tuple[Array, State]]
    predict: Callable[[State, Images], Array]


def positive(text: str) -> int:
    """An integer, 1 or more, from the command line."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"required an integer, 1 or more; got {number}")
    return number


def scaling_for(options: argparse.Namespace) -> halfstep.AbstractLossScaling:
    """Float16 needs a loss scale. Its usual growth period, 2000 steps, is more than a run has."""
    if options.policy == "f16":
        return halfstep.DynamicLossScaling(options.loss_scale, period=100)
    return halfstep.NoLossScaling()


def normalize(images: UInt8[np.ndarray, "batch rows columns channels"]) -> Images:
    """Bytes to floats from -1 to 1."""
    return jnp.asarray(images, jnp.float32) / 127.5 - 1


def accuracy(task: Task, state: State, data: Dataset, chunk: int = 1000) -> float:
    """On the whole test set, from 0 to 1."""
    correct = 0
    for at in range(0, len(data.test_labels), chunk):
        images, labels = data.test_images[at : at + chunk], data.test_labels[at : at + chunk]
        correct += int(jnp.sum(task.predict(state, normalize(images)) == labels))
    return correct / len(data.test_labels)


def train(task: Task, data: Dataset, options: argparse.Namespace) -> list[Record]:
    """One run. It writes `metrics.jsonl` below `options.out`, and returns its records."""
    out = options.out / options.policy
    out.mkdir(parents=True, exist_ok=True)
    state, steps = task.state, options.steps
    batches = shuffled_batches(
        data.train_images, data.train_labels, size=options.batch, seed=options.seed
    )
    with Log(out / "metrics.jsonl", name=f"{options.policy:>4}", steps=steps) as log:
        for step, (images, labels) in zip(range(1, steps + 1), batches, strict=False):
            loss, state = task.step(state, normalize(images), jnp.asarray(labels))
            log.tick()
            evaluates = step == steps or step % options.eval_every == 0
            if evaluates or step % options.log_every == 0:
                # Raises once nothing but skips is left, and says where to look.
                state["ledger"].check(scaling=state["scaling"])
                record: Record = {
                    "step": step,
                    "loss": float(loss),
                    "loss_scale": float(np.asarray(state["scaling"].loss_scaling)),
                    "skipped": int(state["ledger"].skipped),
                }
                if evaluates:
                    record["test_accuracy"] = accuracy(task, state, data)
                log.write(record)
    return log.records


def main(
    make: Callable[[Dataset, argparse.Namespace], Task],
    *,
    module: tuple[str, str | None],
    argv: Sequence[str] | None,
    policy: Sequence[str],
    steps: int = 400,
    learning_rate: float,
    width: int = 32,
) -> None:
    """The command line of an example.

    Args:
        make: Makes the task from a data set and options, such as `policy`.
        module: The example's name and docstring.
        argv: The arguments, or `None` for those of the process.
        policy: Those that are run by default.
        steps: How many there are by default.
        learning_rate: By default.
        width: By default; an example says what it means.
    """
    name, doc = module[0], module[1] or ""
    parser = argparse.ArgumentParser(
        prog=f"python -m examples.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--policy", nargs="+", choices=STYLES, default=policy, help=f"({' '.join(policy)})")
    for option, kind, default, text in (
        ("seed", int, 0, "of weights and of the order of the data"),
        ("steps", positive, steps, "how many"),
        ("batch", positive, 128, "images in a step"),
        ("width", positive, width, "of the network"),
        ("learning-rate", float, learning_rate, "at its highest"),
        ("loss-scale", float, 2.0**15, "float16's first loss scale, a power of two"),
        ("log-every", positive, 10, "steps between records"),
        ("eval-every", positive, 100, "steps between evaluations"),
    ):
        add(f"--{option}", type=kind, default=default, help=f"{text} ({default})")
    out = pathlib.Path("runs") / name
    add("--data", type=pathlib.Path, default=FASHION_MNIST, help=f"({FASHION_MNIST})")
    add("--out", type=pathlib.Path, default=out, help=f"({out})")
    options = parser.parse_args(argv)
    data = load_fashion_mnist(options.data)
    runs: dict[str, list[list[Record]]] = {}
    for chosen in options.policy:
        each = argparse.Namespace(**{**vars(options), "policy": chosen})
        runs[chosen] = [train(make(data, each), data, each)]
    title = f"{doc.splitlines()[0].rstrip('.')}: {options.steps} steps"
    plot_curves(runs, options.out / "curves.png", title=title)
    for chosen, (records,) in runs.items():
        end = records[-1]
        print(f"{chosen:>4}  held-out accuracy {end['test_accuracy']:.2%}", end="  ")
        print(f"loss {end['loss']:.3f}  steps skipped {end['skipped']}")
    print(f"Metrics and curves: {options.out}")
