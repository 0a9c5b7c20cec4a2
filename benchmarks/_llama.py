"""The shape of a LLaMA, as a stack of layers for `optim.release`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Params = dict[str, Any]
Pin = Callable[[Array], Array]
"""Says where activations lie: over many devices, what every product and sum returns."""


def anywhere(x: Array) -> Array:
    """One device: there is nothing to say."""
    return x


def shapes(*, layers: int, width: int, hidden: int, vocabulary: int) -> Params:
    """Parameters as they are computed with: matrices in bfloat16, norms in float32."""

    def matrix(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def norm(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    square, up = (layers, width, width), (layers, width, hidden)
    return {
        "outer": {
            "embed": matrix(vocabulary, width),
            "norm": norm(width),
            "head": matrix(vocabulary, width),
        },
        "layers": {
            "attention_norm": norm(layers, width),
            "query": matrix(*square),
            "key": matrix(*square),
            "value": matrix(*square),
            "out": matrix(*square),
            "mlp_norm": norm(layers, width),
            "gate": matrix(*up),
            "up": matrix(*up),
            "down": matrix(layers, hidden, width),
        },
    }


def first(
    outer: Params, ids: Int[Array, "batch tokens"], *, pin: Pin = anywhere
) -> Float[Array, "batch tokens width"]:
    return pin(outer["embed"][ids[:, :-1]])


def layer(
    params: Params,
    x: Float[Array, "batch tokens width"],
    outer: Params,
    ids: Any,
    *,
    pin: Pin = anywhere,
) -> Float[Array, "batch tokens width"]:
    del outer, ids
    x = x + _attend(params, _normalize(params["attention_norm"], x), pin)
    wide = _normalize(params["mlp_norm"], x)
    hidden = jax.nn.silu(pin(wide @ params["gate"])) * pin(wide @ params["up"])
    return pin(x + pin(hidden @ params["down"]))


def last(
    outer: Params, x: Any, ids: Int[Array, "batch tokens"], *, pin: Pin = anywhere
) -> Float[Array, ""]:
    scores = pin(_normalize(outer["norm"], x) @ outer["head"].T).astype(jnp.float32)
    at = jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - at)


def _normalize(scale: Array, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def _attend(params: Params, x: Array, pin: Pin, size: int = 128) -> Array:
    batch, tokens, width = x.shape
    query, key, value = (
        pin(x @ params[name]).reshape(batch, tokens, width // size, size)
        for name in ("query", "key", "value")
    )
    mixed = jax.nn.dot_product_attention(_turned(query), _turned(key), value, is_causal=True)
    return pin(mixed.reshape(x.shape) @ params["out"])


def _turned(x: Array) -> Array:
    """Rotary positions."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    cosine, sine = (
        part.astype(x.dtype)[None, :, None] for part in (jnp.cos(angle), jnp.sin(angle))
    )
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cosine - b * sine, a * sine + b * cosine], axis=-1)
