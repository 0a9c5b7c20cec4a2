"""A language model in plain float32 and without any framework."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

Params = dict[str, Any]


def init(
    *,
    vocabulary: int = 50_257,
    tokens: int = 1024,
    width: int = 768,
    layers: int = 12,
    key: Array,
) -> Params:
    """Parameters; those of the blocks are stacked along a first axis, for a scan over them."""
    keys = jax.random.split(key, 6)

    def normal(key: Array, *shape: int, over: int = 1) -> Array:
        return 0.02 / over**0.5 * jax.random.normal(key, shape)

    return {
        "embed": normal(keys[0], vocabulary, width),
        "position": normal(keys[1], tokens, width),
        "blocks": {
            "attention_norm": _norm(layers, width),
            "qkv": _linear(normal(keys[2], layers, width, 3 * width)),
            "out": _linear(normal(keys[3], layers, width, width, over=2 * layers)),
            "mlp_norm": _norm(layers, width),
            "up": _linear(normal(keys[4], layers, width, 4 * width)),
            "down": _linear(normal(keys[5], layers, 4 * width, width, over=2 * layers)),
        },
        "norm": _norm(width),
    }


def _norm(*shape: int) -> Params:
    return {"scale": jnp.ones(shape), "bias": jnp.zeros(shape)}


def _linear(weight: Array) -> Params:
    return {"weight": weight, "bias": jnp.zeros((*weight.shape[:-2], weight.shape[-1]))}


def _normalize(norm: Params, x: Array) -> Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * norm["scale"] + norm["bias"]


def dense(linear: Params, x: Array) -> Array:
    """A weight and a bias, applied."""
    return x @ linear["weight"] + linear["bias"]


Dense = Callable[[Params, Array], Array]


def _attend(
    block: Params, x: Float[Array, "batch tokens width"], heads: int, apply: Dense
) -> Array:
    batch, tokens, width = x.shape
    qkv = apply(block["qkv"], x).reshape(batch, tokens, 3, heads, width // heads)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, tokens, width)
    return apply(block["out"], mixed)


def logits(
    params: Params,
    ids: Int[Array, "batch tokens"],
    *,
    heads: int = 12,
    remat: bool = False,
    saved: Callable[..., Any] | None = None,
    scan: bool = True,
    named: bool = False,
    apply: Dense = dense,
) -> Float[Array, "batch tokens vocabulary"]:
    """Scores of the next token at every position; the embedding is used at both ends.

    With `remat` each layer is recomputed but for what the policy `saved` says. With `scan=False`
    the layers are written out one after the other, with `named` in scopes `block0`, `block1` and so
    on. `apply` is how they multiply by their weights.
    """

    def block(x: Array, layer: Params) -> tuple[Array, None]:
        x = x + _attend(layer, _normalize(layer["attention_norm"], x), heads, apply)
        hidden = jax.nn.gelu(apply(layer["up"], _normalize(layer["mlp_norm"], x)))
        return x + apply(layer["down"], hidden), None

    x = params["embed"][ids] + params["position"][: ids.shape[1]]
    # Within a scan nothing merges the two computations, so that no barrier is needed.
    body = jax.checkpoint(block, prevent_cse=not scan, policy=saved) if remat else block
    if scan:
        x, _ = jax.lax.scan(body, x, params["blocks"])
    else:
        for number in range(params["blocks"]["qkv"]["weight"].shape[0]):
            layer = jax.tree.map(lambda stacked, number=number: stacked[number], params["blocks"])
            with jax.named_scope(f"block{number}") if named else contextlib.nullcontext():
                x, _ = body(x, layer)
    return _normalize(params["norm"], x) @ params["embed"].T


def loss(params: Params, ids: Int[Array, "batch tokens"], **options: Any) -> Float[Array, ""]:
    """Mean cross-entropy of every token but the first, in float32; options as of `logits`."""
    scores = logits(params, ids[:, :-1], **options).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, ids[:, 1:]))
