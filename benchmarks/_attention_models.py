"""Models of `benchmarks.stored`: one layer of attention in many spellings, and decoders."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from benchmarks import _llama
from benchmarks._models import Model

SIZES: Mapping[str, int] = MappingProxyType({"tokens": 2048, "heads": 16, "keys": 4, "size": 128})
# Ways to write the same layer. A spelling has one of each.
SCALES: Mapping[str, Callable[[Array, int], Array]] = MappingProxyType(
    {
        "literal": lambda scores, size: scores / math.sqrt(size),
        "sqrt": lambda scores, size: scores / jnp.sqrt(size * 1.0),
        "factor": lambda scores, size: scores * size**-0.5,
    }
)
MASKS: Mapping[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {
        "no mask": lambda scores, mask: scores,
        "-1e30": lambda scores, mask: jnp.where(mask, scores, -1e30),
        "-inf": lambda scores, mask: jnp.where(mask, scores, -jnp.inf),
        "added": lambda scores, mask: scores + jnp.where(mask, 0.0, -1e9),
    }
)
QUERIES = ("repeated keys", "grouped queries")


def spellings(sizes: Mapping[str, int] = SIZES) -> list[Model]:
    """One layer of attention in all its spellings."""
    init = functools.partial(_init_attention, sizes=sizes)
    return [
        Model(
            f"attention, {scale}, {mask}, {queries}",
            sizes,
            init,
            functools.partial(
                _attention_loss, scale=scale, mask=mask, queries=queries, sizes=sizes
            ),
            lambda batch: (
                jax.ShapeDtypeStruct(
                    (batch, sizes["tokens"], sizes["heads"] * sizes["size"]), jnp.float32
                ),
            ),
        )
        for scale, mask, queries in itertools.product(SCALES, MASKS, QUERIES)
    ]


def _init_attention(key: Array, *, sizes: Mapping[str, int]) -> dict[str, Array]:
    width, narrow = sizes["heads"] * sizes["size"], sizes["keys"] * sizes["size"]
    shapes = {"q": width, "k": narrow, "v": narrow, "o": width}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(one, (width, out)) / math.sqrt(width)
        for one, (name, out) in zip(keys, shapes.items(), strict=True)
    }


def _attention_loss(
    params: dict[str, Array],
    x: Array,
    *,
    scale: str,
    mask: str,
    queries: str,
    sizes: Mapping[str, int],
) -> Array:
    batch, tokens, _ = x.shape
    heads, keys, size = sizes["heads"], sizes["keys"], sizes["size"]
    query = (x @ params["q"]).reshape(batch, tokens, heads, size)
    key, value = ((x @ params[name]).reshape(batch, tokens, keys, size) for name in "kv")
    if queries == "repeated keys":
        key, value = (jnp.repeat(one, heads // keys, 2) for one in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    else:
        query = query.reshape(batch, tokens, keys, heads // keys, size)
        scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key)
    lower = jnp.tril(jnp.ones((1,) * (scores.ndim - 2) + (tokens, tokens), bool))
    scores = MASKS[mask](SCALES[scale](scores, size), lower)
    weights = jax.nn.softmax(scores, axis=-1)
    form = "bhqk,bkhd->bqhd" if queries == "repeated keys" else "bkgqs,bskd->bqkgd"
    mixed = jnp.einsum(form, weights, value).reshape(batch, tokens, heads * size)
    return jnp.mean((mixed @ params["o"]).astype(jnp.float32) ** 2)


def llama(name: str, *, remat: Any = None, tokens: int, **sizes: int) -> Model:
    """A scanned decoder with rotary positions and gated layers.

    Args:
        name: Of the model.
        remat: A policy of `jax.checkpoint` around each layer; without one, there is none.
        tokens: Of a sequence.
        **sizes: As `_llama.shapes` takes them.
    """

    def init(key: Array) -> Any:
        del key
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), _llama.shapes(**sizes))

    def loss(params: Any, ids: Array) -> Array:
        def layer(x: Array, one: Any) -> tuple[Array, None]:
            return _llama.layer(one, x, {}, ()), None

        step = layer if remat is None else jax.checkpoint(layer, policy=remat)
        x = _llama.first(params["outer"], ids)
        x = jax.lax.scan(step, x, params["layers"])[0]
        return _llama.last(params["outer"], x, ids)

    return Model(name, {**sizes, "tokens": tokens}, init, loss, _tokens(tokens))


def mamba(name: str, *, vocabulary: int, tokens: int, width: int, layers: int) -> Model:
    """A scanned decoder whose layers decay a state by gates of their input."""

    def init(key: Array) -> dict[str, Array]:
        del key
        stack = {"norm": (width,), "in": (width, 4 * width), "decay": (width,)}
        shapes = {**stack, "out": (width, width)}
        made = {one: jnp.zeros((layers, *shape)) for one, shape in shapes.items()}
        return {"embed": jnp.zeros((vocabulary, width)), **made}

    def layer(x: Array, one: dict[str, Array]) -> tuple[Array, None]:
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5)
        made = (wide * one["norm"]).astype(x.dtype) @ one["in"]
        value, step, read, gate = jnp.split(made, 4, axis=-1)
        step = jax.nn.softplus(step)
        kept = jnp.exp(-step * jnp.exp(one["decay"]))

        def advance(state: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
            kept, value, read = row
            state = kept * state + value
            return state, state * read

        rows = tuple(jnp.moveaxis(part, 1, 0) for part in (kept, step * value, read))
        out = jax.lax.scan(advance, jnp.zeros_like(x[:, 0]), rows)[1]
        return x + (jnp.moveaxis(out, 0, 1) * jax.nn.silu(gate)) @ one["out"], None

    def loss(params: dict[str, Array], ids: Array) -> Array:
        stack = {name: leaf for name, leaf in params.items() if name != "embed"}
        x = jax.lax.scan(layer, params["embed"][ids[:, :-1]], stack)[0]
        scores = (x @ params["embed"].T).astype(jnp.float32)
        at = jnp.take_along_axis(scores, ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - at)

    sizes = {"vocabulary": vocabulary, "tokens": tokens, "width": width, "layers": layers}
    return Model(name, sizes, init, loss, _tokens(tokens))


def _tokens(tokens: int) -> Callable[[int], tuple[jax.ShapeDtypeStruct, ...]]:
    return lambda batch: (jax.ShapeDtypeStruct((batch, tokens + 1), jnp.int32),)
