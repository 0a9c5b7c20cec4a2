"""A language model of bytes in plain JAX. Nothing in it knows of mixed precision or of devices.

The parameters of all blocks are stacked along a first axis and the blocks are a scan over it: a
deep model compiles as fast as a flat one, and each iteration gathers the weights of one block.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

Params = dict[str, Any]
BYTES = 256


def init(*, tokens: int, width: int, layers: int, key: PRNGKeyArray) -> Params:
    """Parameters in float32."""
    keys = jax.random.split(key, 6)

    def normal(key: PRNGKeyArray, *shape: int, scale: float = 0.02) -> Array:
        return scale * jax.random.normal(key, shape)

    out = 0.02 / (2 * layers) ** 0.5
    return {
        "embed": normal(keys[0], BYTES, width),
        "position": normal(keys[1], tokens, width),
        "blocks": {
            "attention_norm": jnp.ones((layers, width)),
            "qkv": normal(keys[2], layers, width, 3 * width),
            "out": normal(keys[3], layers, width, width, scale=out),
            "mlp_norm": jnp.ones((layers, width)),
            "up": normal(keys[4], layers, width, 4 * width),
            "down": normal(keys[5], layers, 4 * width, width, scale=out),
        },
        "norm": jnp.ones(width),
    }


def normalize(x: Array, scale: Array) -> Array:
    """RMS norm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def attention(x: Float[Array, "batch tokens width"], block: Params, heads: int) -> Array:
    """What each token takes from those before it."""
    batch, tokens, width = x.shape
    qkv = normalize(x, block["attention_norm"]) @ block["qkv"]
    q, k, v = jnp.moveaxis(qkv.reshape(batch, tokens, 3, heads, width // heads), 2, 0)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return mixed.reshape(batch, tokens, width) @ block["out"]


def _block(x: Float[Array, "batch tokens width"], block: Params, heads: int) -> Array:
    x = x + attention(x, block, heads)
    hidden = jax.nn.gelu(normalize(x, block["mlp_norm"]) @ block["up"])
    return x + hidden @ block["down"]


def loss(params: Params, text: UInt8[Array, "batch length"], *, heads: int) -> Float[Array, ""]:
    """Mean cross-entropy of each byte given those before it, in nats."""
    ids: Int[Array, "batch length"] = text.astype(jnp.int32)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    x = params["embed"][inputs] + params["position"][: inputs.shape[1]]

    @jax.checkpoint
    def body(x: Array, block: Params) -> tuple[Array, None]:
        return _block(x, block, heads), None

    x, _ = jax.lax.scan(body, x, params["blocks"])
    logits = normalize(x, params["norm"]) @ params["embed"].T
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))
