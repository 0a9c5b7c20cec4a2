"""An encoder that is normalized after each residual sum, in plain float32: BERT."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from tests.models.gpt import dense

Params = dict[str, Any]


def init(
    *,
    vocabulary: int = 30_522,
    tokens: int = 512,
    width: int = 768,
    hidden: int = 3072,
    layers: int = 12,
    key: Array,
) -> Params:
    """Parameters; those of the layers are stacked along a first axis, for a scan over them."""
    keys = jax.random.split(key, 7)

    def linear(key: Array, *shape: int) -> Params:
        bias = jnp.zeros((*shape[:-2], shape[-1]))
        return {"weight": 0.02 * jax.random.normal(key, shape), "bias": bias}

    def norm(*shape: int) -> Params:
        return {"scale": jnp.ones(shape), "bias": jnp.zeros(shape)}

    return {
        "embed": 0.02 * jax.random.normal(keys[0], (vocabulary, width)),
        "position": 0.02 * jax.random.normal(keys[1], (tokens, width)),
        "embed_norm": norm(width),
        "layers": {
            "qkv": linear(keys[2], layers, width, 3 * width),
            "out": linear(keys[3], layers, width, width),
            "attention_norm": norm(layers, width),
            "up": linear(keys[4], layers, width, hidden),
            "down": linear(keys[5], layers, hidden, width),
            "mlp_norm": norm(layers, width),
        },
        "head": linear(keys[6], width, width),
        "head_norm": norm(width),
        "head_bias": jnp.zeros(vocabulary),
    }


def _normalize(norm: Params, x: Array) -> Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-12) * norm["scale"] + norm["bias"]


def _attend(layer: Params, x: Float[Array, "batch tokens width"], heads: int) -> Array:
    batch, tokens, width = x.shape
    qkv = dense(layer["qkv"], x).reshape(batch, tokens, 3, heads, width // heads)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return dense(layer["out"], mixed.reshape(batch, tokens, width))


def loss(
    params: Params,
    ids: Int[Array, "batch tokens"],
    labels: Int[Array, "batch tokens"],
    *,
    heads: int = 12,
    remat: bool = False,
    saved: Callable[..., Any] | None = None,
    scan: bool = True,
) -> Float[Array, ""]:
    """Mean cross-entropy of the tokens that were masked, in float32; other labels are negative.

    With `remat` each layer is recomputed but for what the policy `saved` says. With `scan=False`
    the layers are written out one after the other.
    """

    def body(x: Array, layer: Params) -> tuple[Array, None]:
        x = _normalize(layer["attention_norm"], x + _attend(layer, x, heads))
        hidden = dense(layer["down"], jax.nn.gelu(dense(layer["up"], x)))
        return _normalize(layer["mlp_norm"], x + hidden), None

    embedded = params["embed"][ids] + params["position"][: ids.shape[1]]
    x = _normalize(params["embed_norm"], embedded)
    body = jax.checkpoint(body, prevent_cse=not scan, policy=saved) if remat else body
    if scan:
        x, _ = jax.lax.scan(body, x, params["layers"])
    else:
        for number in range(params["layers"]["qkv"]["weight"].shape[0]):
            layer = jax.tree.map(lambda stacked, number=number: stacked[number], params["layers"])
            x, _ = body(x, layer)
    x = _normalize(params["head_norm"], jax.nn.gelu(dense(params["head"], x)))
    scores = (x @ params["embed"].T + params["head_bias"]).astype(jnp.float32)
    masked = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(labels, 0))
    return jnp.sum(jnp.where(masked, losses, 0)) / jnp.maximum(jnp.sum(masked), 1)
