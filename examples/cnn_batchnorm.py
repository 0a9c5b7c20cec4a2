"""A convolutional network with batch norm, in float16 with loss scaling.

    python -m examples.cnn_batchnorm
    python -m examples.cnn_batchnorm --policy f16 --loss-scale 16777216

Equinox keeps the running statistics of `BatchNorm` in a state apart from the model.
Convolutions run in 16 bits; means, variances and the statistics stay in float32, and a step that is
skipped leaves the statistics as they were.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

import halfstep
from examples import _classify
from examples._classify import Images, Labels, State, Task


class CNN(eqx.Module):
    """Three convolutions, each with batch norm. Nothing in it knows of mixed precision."""

    convolutions: list[eqx.nn.Conv2d]
    norms: list[eqx.nn.BatchNorm]
    head: eqx.nn.Linear

    def __init__(self, channels: int, classes: int, width: int, *, key: PRNGKeyArray):
        keys, sizes = jax.random.split(key, 4), (channels, width, 2 * width, 2 * width)
        self.convolutions = [
            eqx.nn.Conv2d(sizes[n], sizes[n + 1], 3, stride=2, padding=1, key=keys[n])
            for n in range(3)
        ]
        self.norms = [
            eqx.nn.BatchNorm(size, axis_name="batch", mode="batch", momentum=0.9)
            for size in sizes[1:]
        ]
        self.head = eqx.nn.Linear(sizes[-1], classes, key=keys[3])

    def __call__(
        self, image: Float[Array, "rows columns channels"], state: eqx.nn.State
    ) -> tuple[Float[Array, " classes"], eqx.nn.State]:
        """The logits of one image, and the statistics with the batch's in them."""
        x = jnp.moveaxis(image, -1, 0)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x, state = norm(convolution(x), state)
            x = jax.nn.relu(x)
        return self.head(jnp.mean(x, axis=(1, 2))), state


def logits(model: CNN, statistics: eqx.nn.State, images: Images) -> tuple[Array, eqx.nn.State]:
    batched = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    return batched(images, statistics)


def loss(
    model: CNN, statistics: eqx.nn.State, images: Images, labels: Labels
) -> tuple[Array, eqx.nn.State]:
    """The loss of a batch and the new statistics, as anybody would write it in float32."""
    scores, statistics = logits(model, statistics, images)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), statistics


def make(data: Any, options: argparse.Namespace) -> Task:
    optimizer = optax.adamw(optax.cosine_decay_schedule(options.learning_rate, options.steps))

    @eqx.filter_jit
    def step(state: State, images: Images, labels: Labels) -> tuple[Array, State]:
        (value, statistics), scaling, finite, grads = halfstep.filter_value_and_grad(
            loss, state["scaling"], policy=options.policy, has_aux=True, check_finite=True
        )(state["model"], state["statistics"], images, labels)

        def commit(trained: Any) -> Any:
            model, _, optimizer_state = trained
            model, optimizer_state = halfstep.apply_gradients(
                model, optimizer, optimizer_state, grads
            )
            return model, statistics, optimizer_state

        # All of it, or nothing: a bad batch must not spoil the running statistics either.
        trained = (state["model"], state["statistics"], state["optimizer"])
        trained, ledger = halfstep.transaction(finite, commit, trained, state["ledger"])
        names = ("model", "statistics", "optimizer")
        return value, {
            **dict(zip(names, trained, strict=True)),
            "scaling": scaling,
            "ledger": ledger,
        }

    @eqx.filter_jit
    def predict(state: State, images: Images) -> Array:
        model = eqx.nn.inference_mode(state["model"])
        scores, _ = halfstep.autocast(logits, options.policy)(model, state["statistics"], images)
        return jnp.argmax(scores, axis=-1)

    model, statistics = eqx.nn.make_with_state(CNN)(
        data.train_images.shape[-1],
        data.classes,
        options.width,
        key=jax.random.key(options.seed),
    )
    state = {
        "model": model,
        "statistics": statistics,
        "optimizer": optimizer.init(eqx.filter(model, eqx.is_inexact_array)),
        "scaling": _classify.scaling_for(options),
        "ledger": halfstep.Ledger(limit=50),
    }
    return Task(state, step, predict)


def main(argv: Sequence[str] | None = None) -> None:
    _classify.main(
        make,
        module=("cnn_batchnorm", __doc__),
        argv=argv,
        policy=("f32", "f16"),
        learning_rate=3e-3,
        width=16,
    )


if __name__ == "__main__":
    main()
