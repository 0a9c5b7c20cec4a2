"""A Haiku network with batch norm, whose averages are state.

    python -m examples.haiku_mlp
    python -m examples.haiku_mlp --policy f32 f16

`hk.transform_with_state` keeps averages in a dictionary of their own. halfstep takes both
dictionaries as they are: parameters are computed with in 16 bits, averages stay in float32, and
`transaction` applies parameters, optimizer and averages together or not at all.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

import halfstep
from examples import _classify
from examples._classify import Images, Labels, State, Task

LAYERS = 2


def make(data: Any, options: argparse.Namespace) -> Task:
    def network(images: Images, is_training: bool) -> Array:
        x = hk.Flatten()(images)
        for _ in range(LAYERS):
            x = hk.Linear(options.width)(x)
            x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training)
            x = jax.nn.relu(x)
        return hk.Linear(data.classes)(x)

    # Nothing here draws random numbers, so the functions take no key.
    net = hk.without_apply_rng(hk.transform_with_state(network))

    def loss(params: Any, averages: Any, images: Images, labels: Labels) -> tuple[Array, Any]:
        """The loss of a batch and the new averages, as anybody would write it in float32."""
        logits, averages = net.apply(params, averages, images, True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), averages

    optimizer = optax.adamw(optax.cosine_decay_schedule(options.learning_rate, options.steps))

    @jax.jit
    def step(state: State, images: Images, labels: Labels) -> tuple[Array, State]:
        (value, averages), scaling, finite, grads = halfstep.filter_value_and_grad(
            loss, state["scaling"], policy=options.policy, has_aux=True, check_finite=True
        )(state["params"], state["averages"], images, labels)

        def commit(trained: State) -> State:
            params, optimizer_state = halfstep.apply_gradients(
                trained["params"], optimizer, trained["optimizer"], grads
            )
            return {"params": params, "averages": averages, "optimizer": optimizer_state}

        trained = {name: state[name] for name in ("params", "averages", "optimizer")}
        trained, ledger = halfstep.transaction(finite, commit, trained, state["ledger"])
        return value, {**trained, "scaling": scaling, "ledger": ledger}

    @jax.jit
    def predict(state: State, images: Images) -> Array:
        def scores(params: Any, averages: Any, images: Images) -> Array:
            return net.apply(params, averages, images, False)[0]

        low = halfstep.autocast(scores, options.policy)
        return jnp.argmax(low(state["params"], state["averages"], images), axis=-1)

    images = jnp.zeros((1, *data.train_images.shape[1:]))
    params, averages = net.init(jax.random.key(options.seed), images, True)
    state = {
        "params": params,
        "averages": averages,
        "optimizer": optimizer.init(params),
        "scaling": _classify.scaling_for(options),
        "ledger": halfstep.Ledger(limit=50),
    }
    return Task(state, step, predict)


def main(argv: Sequence[str] | None = None) -> None:
    _classify.main(
        make,
        module=("haiku_mlp", __doc__),
        width=320,
        argv=argv,
        policy=("f32", "bf16"),
        learning_rate=2e-3,
    )


if __name__ == "__main__":
    main()
