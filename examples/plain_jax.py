"""A network of dictionaries and jax.numpy alone, in three precisions.

    python -m examples.plain_jax
    python -m examples.plain_jax --policy f16 --loss-scale 16777216

No framework and no optimizer library: parameters are a dictionary, momentum is another one, and
the update is two lines. Mixed precision is one line, and `select_tree`, which leaves everything as
it was if the gradients are not finite.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

import halfstep
from examples import _classify
from examples._classify import Images, Labels, State, Task

Params = dict[str, Array]
LAYERS = 3


def init(key: Array, pixels: int, hidden: int, classes: int) -> Params:
    """Parameters in float32."""
    sizes = (pixels, *(hidden,) * (LAYERS - 1), classes)
    params: Params = {}
    for layer, own in enumerate(jax.random.split(key, LAYERS)):
        shape = sizes[layer : layer + 2]
        params[f"w{layer}"] = jax.random.normal(own, shape) * (2 / shape[0]) ** 0.5
        params[f"b{layer}"] = jnp.zeros(shape[1])
    return params


def logits(params: Params, images: Images) -> Float[Array, "batch classes"]:
    x = images.reshape(len(images), -1)
    for layer in range(LAYERS):
        x = x @ params[f"w{layer}"] + params[f"b{layer}"]
        x = jax.nn.relu(x) if layer < LAYERS - 1 else x
    return x


def loss(params: Params, images: Images, labels: Labels) -> Float[Array, ""]:
    """The loss of a batch, as anybody would write it in float32."""
    scores = jax.nn.log_softmax(logits(params, images))
    return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))


def make(data: Any, options: argparse.Namespace) -> Task:
    def rate(step: Array) -> Array:
        """Falls to zero along a cosine."""
        return options.learning_rate * (1 + jnp.cos(jnp.pi * step / options.steps)) / 2

    @jax.jit
    def step(state: State, images: Images, labels: Labels) -> tuple[Array, State]:
        value, scaling, finite, grads = halfstep.filter_value_and_grad(
            loss, state["scaling"], policy=options.policy, check_finite=True
        )(state["params"], images, labels)
        # The gradients are float32 and already unscaled.
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
        now = rate(state["ledger"].steps)
        params = jax.tree.map(lambda p, m: p - now * m, state["params"], momentum)
        trained, old = (params, momentum), (state["params"], state["momentum"])
        params, momentum = halfstep.select_tree(finite, trained, old)
        ledger = state["ledger"].record(finite)
        new = {"params": params, "momentum": momentum, "scaling": scaling, "ledger": ledger}
        return value, new

    @jax.jit
    def predict(state: State, images: Images) -> Array:
        scores = halfstep.autocast(logits, options.policy)(state["params"], images)
        return jnp.argmax(scores, axis=-1)

    pixels = data.train_images[0].size
    params = init(jax.random.key(options.seed), pixels, options.width, data.classes)
    state = {
        "params": params,
        "momentum": jax.tree.map(jnp.zeros_like, params),
        "scaling": _classify.scaling_for(options),
        "ledger": halfstep.Ledger(limit=50),
    }
    return Task(state, step, predict)


def main(argv: Sequence[str] | None = None) -> None:
    policies = ("f32", "bf16", "f16")
    _classify.main(
        make,
        module=("plain_jax", __doc__),
        width=320,
        argv=argv,
        policy=policies,
        learning_rate=0.05,
    )


if __name__ == "__main__":
    main()
