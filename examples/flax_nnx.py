"""A Flax NNX network with batch norm and dropout, in bfloat16.

    python -m examples.flax_nnx
    python -m examples.flax_nnx --policy f32 bf16 f16

NNX modules are changed in place, and `halfstep.integrations.nnx` takes them as they are.
Compared with the float32 step, two lines change: `nnx.value_and_grad` and `optimizer.update`. A
step that is skipped leaves parameters, optimizer and statistics as they were; dropout draws new
numbers anyway.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float

import halfstep
from examples import _classify
from examples._classify import Images, Labels, State, Task
from halfstep.integrations import nnx as mixed


class Net(nnx.Module):
    """Two convolutions and two layers. Nothing in it knows of mixed precision."""

    def __init__(self, shape: Sequence[int], classes: int, width: int, *, rngs: nnx.Rngs):
        rows, columns, channels = shape
        self.first = nnx.Conv(channels, width, (3, 3), strides=2, rngs=rngs)
        self.first_norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.second = nnx.Conv(width, 2 * width, (3, 3), strides=2, rngs=rngs)
        self.second_norm = nnx.BatchNorm(2 * width, momentum=0.9, rngs=rngs)
        # A convolution of stride 2 rounds up, twice.
        pixels = (-(-rows // 4)) * (-(-columns // 4))
        self.hidden = nnx.Linear(pixels * 2 * width, 4 * width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.head = nnx.Linear(4 * width, classes, rngs=rngs)

    def __call__(self, images: Images) -> Float[Array, "batch classes"]:
        """The logits of a batch."""
        x = nnx.relu(self.first_norm(self.first(images)))
        x = nnx.relu(self.second_norm(self.second(x)))
        x = nnx.relu(self.hidden(x.reshape(len(x), -1)))
        return self.head(self.dropout(x))


def loss(model: Net, images: Images, labels: Labels) -> Float[Array, ""]:
    """The loss of a batch, as anybody would write it in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def make(data: Any, options: argparse.Namespace) -> Task:
    shape = data.train_images.shape[1:]
    model = Net(shape, data.classes, options.width, rngs=nnx.Rngs(options.seed))
    schedule = optax.cosine_decay_schedule(options.learning_rate, options.steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)

    @nnx.jit
    def train_step(
        model: Net, optimizer: nnx.Optimizer, scaling: Any, ledger: Any, images: Any, labels: Any
    ) -> Any:
        value, scaling, finite, grads = mixed.value_and_grad(
            loss, scaling, policy=options.policy, check_finite=True
        )(model, images, labels)
        mixed.optimizer_update(optimizer, model, grads, finite)
        return value, scaling, ledger.record(finite)

    @nnx.jit
    def evaluate(model: Net, images: Images) -> Array:
        graph, state = nnx.split(nnx.view(model, deterministic=True, use_running_average=True))

        def scores(state: Any, images: Images) -> Array:
            return nnx.merge(graph, state)(images)

        return jnp.argmax(halfstep.autocast(scores, options.policy)(state, images), axis=-1)

    def step(state: State, images: Images, labels: Labels) -> tuple[Array, State]:
        value, scaling, ledger = train_step(
            model, optimizer, state["scaling"], state["ledger"], images, labels
        )
        return value, {"scaling": scaling, "ledger": ledger}

    state = {"scaling": _classify.scaling_for(options), "ledger": halfstep.Ledger(limit=50)}
    return Task(state, step, lambda _, images: evaluate(model, images))


def main(argv: Sequence[str] | None = None) -> None:
    _classify.main(
        make, module=("flax_nnx", __doc__), argv=argv, policy=("bf16",), learning_rate=2e-3
    )


if __name__ == "__main__":
    main()
