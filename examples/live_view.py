"""Watch a training loop: loss, loss scale, skips, underflow and overflow on one line.

    python -m examples.live_view
    python -m examples.live_view --style rich --steps 600

A small network learns Fashion-MNIST in float16. Its loss scale begins far too low: gradients
underflow. It grows until they overflow, and from then on a step is skipped now and then. The line
is written behind tqdm's bar, or by rich; at the end there are a picture and a table.
"""

import argparse
import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float
from tqdm import tqdm

import halfstep
from examples._data import FASHION_MNIST, Dataset, load_fashion_mnist, shuffled_batches

OUT = pathlib.Path("runs/live_view")


class State(eqx.Module):
    """All that goes from step to step."""

    params: dict[str, Array]
    optimizer_state: Any
    scaling: halfstep.DynamicLossScaling
    ledger: halfstep.Ledger


def initial_state(sizes: Sequence[int], optimizer: optax.GradientTransformation) -> State:
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    params = {
        f"layer{n}": jax.random.normal(key, shape) * np.sqrt(2 / shape[0])
        for n, (key, shape) in enumerate(zip(keys, itertools.pairwise(sizes), strict=True))
    }
    # Far too low, to see it grow. The usual one begins with 2**15 and grows every 2000 steps.
    scaling = halfstep.DynamicLossScaling(1, period=15)
    return State(params, optimizer.init(params), scaling, halfstep.Ledger(limit=50))


def loss(params: dict[str, Array], images: Array, labels: Array) -> Float[Array, ""]:
    *hidden, last = params.values()
    x = images.reshape(len(images), -1) / 255
    for weights in hidden:
        x = jax.nn.relu(x @ weights)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ last, labels))


def make_step(optimizer: optax.GradientTransformation) -> Any:
    def step(state: State, images: Array, labels: Array) -> tuple[State, Float[Array, ""]]:
        value, scaling, finite, grads = halfstep.filter_value_and_grad(
            loss, state.scaling, policy="f16"
        )(state.params, images, labels)

        def commit(trained: Any) -> Any:
            return halfstep.apply_gradients(trained[0], optimizer, trained[1], grads)

        trained = (state.params, state.optimizer_state)
        trained, ledger = halfstep.transaction(finite, commit, trained, state.ledger)
        params, optimizer_state = trained
        return State(params, optimizer_state, scaling, ledger), value

    return step


def train(data: Dataset, *, steps: int, batch: int, hidden: int, style: Any) -> halfstep.debug.Live:
    """Train, and show how it goes."""
    optimizer = optax.adam(1e-3)
    pixels = data.train_images[0].size
    state = initial_state((pixels, hidden, hidden, data.classes), optimizer)
    batches = shuffled_batches(
        data.train_images.astype(np.float32), data.train_labels, size=batch, seed=0
    )
    recorder = halfstep.debug.record(make_step(optimizer))
    # The live view has copies of what it needs, so the step may be given state and log for good.
    run = jax.jit(recorder, donate_argnums=(0, 1))
    log = recorder.init(state, *next(batches))
    is_tqdm = style == "tqdm"
    bar = tqdm(range(steps), unit="step", disable=not is_tqdm)
    live = halfstep.debug.Live(bar=bar) if is_tqdm else halfstep.debug.Live(style=style)
    with bar, live:
        for step, (images, labels) in zip(bar, batches, strict=False):
            log, (state, value) = run(log, state, images, labels)
            live.update(step, loss=value, scaling=state.scaling, ledger=state.ledger, log=log)
    return live


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.live_view",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=400, help="(400)")
    parser.add_argument("--batch", type=int, default=128, help="images in a step (128)")
    parser.add_argument("--hidden", type=int, default=256, help="width of the network (256)")
    parser.add_argument("--style", choices=("tqdm", "rich", "none"), default="tqdm", help="(tqdm)")
    parser.add_argument("--data", type=pathlib.Path, default=FASHION_MNIST)
    parser.add_argument("--out", type=pathlib.Path, default=OUT, help=f"({OUT})")
    options = parser.parse_args(argv)
    style = None if options.style == "none" else options.style
    live = train(
        load_fashion_mnist(options.data),
        steps=options.steps,
        batch=options.batch,
        hidden=options.hidden,
        style=style,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    live.plot(options.out / "live.png")
    live.to_json(options.out / "live.json")
    print(live)
    print(f"\nPicture and history: {options.out}")


if __name__ == "__main__":
    main()
