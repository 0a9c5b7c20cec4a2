"""A language model of bytes whose layers have several experts. In plain float32, as `_gpt`.

Each token is sent to the experts that its router likes best. Tokens are sorted by expert, so that
all of an expert's tokens are one matrix product (`jax.lax.ragged_dot`): none is dropped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

from examples import _gpt
from examples._gpt import Params

CHOSEN = 2
BALANCE = 0.01


class Scores(NamedTuple):
    """Of a batch: the loss that is trained, and what is looked at."""

    loss: Float[Array, ""]
    nats: Float[Array, ""]
    accuracy: Float[Array, ""]
    load: Float[Array, "layers experts"]
    """Which part of the tokens each expert was given."""


def init(*, tokens: int, width: int, layers: int, experts: int, key: PRNGKeyArray) -> Params:
    """Parameters in float32: those of `_gpt`, with experts half as wide for its two matrices."""
    params = _gpt.init(tokens=tokens, width=width, layers=layers, key=key)
    keys, block = jax.random.split(jax.random.fold_in(key, 1), 3), params["blocks"]
    block["router"] = 0.02 * jax.random.normal(keys[0], (layers, width, experts))
    block["up"] = 0.02 * jax.random.normal(keys[1], (layers, experts, width, 2 * width))
    scale = 0.02 / (2 * layers) ** 0.5
    block["down"] = scale * jax.random.normal(keys[2], (layers, experts, 2 * width, width))
    return params


def mixture(x: Float[Array, "tokens width"], block: Params) -> tuple[Array, Array, Array]:
    """What the chosen experts say, a penalty for favorites, and each expert's load."""
    with jax.named_scope("router"):
        likes = jax.nn.softmax(x @ block["router"])
        weights, chosen = jax.lax.top_k(likes, CHOSEN)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    experts = likes.shape[-1]
    order = jnp.argsort(chosen.ravel())
    sizes: Int[Array, " experts"] = jnp.bincount(chosen.ravel(), length=experts)
    with jax.named_scope("experts"):
        hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order // CHOSEN], block["up"], sizes))
        said = jax.lax.ragged_dot(hidden, block["down"], sizes)
    said = said[jnp.argsort(order)].reshape(*chosen.shape, -1)
    load = sizes / len(order)
    # The least, 1, is where all experts have the same load.
    penalty = experts * jnp.sum(load * jnp.mean(likes, axis=0))
    return jnp.sum(said * weights[..., None], axis=1), penalty, load


def scores(params: Params, text: UInt8[Array, "batch length"], *, heads: int) -> Scores:
    """Cross-entropy of each byte given those before it, and how many are guessed."""
    ids: Int[Array, "batch length"] = text.astype(jnp.int32)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    x = params["embed"][inputs] + params["position"][: inputs.shape[1]]

    def layer(x: Array, block: Params) -> tuple[Array, tuple[Array, Array]]:
        with jax.named_scope("attention"):
            x = x + _gpt.attention(x, block, heads)
        said, penalty, load = mixture(
            _gpt.normalize(x, block["mlp_norm"]).reshape(-1, x.shape[-1]), block
        )
        return x + said.reshape(x.shape), (penalty, load)

    x, (penalties, loads) = jax.lax.scan(layer, x, params["blocks"])
    with jax.named_scope("head"):
        logits = _gpt.normalize(x, params["norm"]) @ params["embed"].T
    nats = jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == targets)
    return Scores(nats + BALANCE * jnp.mean(penalties), nats, accuracy, loads)
