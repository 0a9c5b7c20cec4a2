"""A transformer of three layers, scanned and rematerialized, as four frameworks write it.

Weights begin as in GPT-2, normal with a deviation of 0.02, where the framework is told how; those
of Equinox begin as it likes. Linen's can be given what multiplies (`product`), and both of Flax's
what changes the whole network (`wrap`), for libraries that ask for one of the two.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY, BATCH = 3, 64, 4, 64, 96, 8


class Case(NamedTuple):
    """Parameters, and the loss of a model with them."""

    params: Any
    loss: Callable[[Any, Any], Any]


def data(number: int = 0) -> jax.Array:
    """One of several batches."""
    return jax.random.randint(jax.random.key(7 + number), (BATCH, TOKENS + 1), 0, VOCABULARY)


_normal = jax.nn.initializers.normal(0.02)


def _loss(logits: Any, ids: Any) -> Any:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]))


# Equinox.


class _Block(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=keys[1])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=keys[2])

    def __call__(self, x: Any) -> Any:
        hidden = jax.vmap(self.norms[0])(x)
        x = x + self.attention(hidden, hidden, hidden)
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.down)(hidden)


class _Equinox(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: _Block
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 3)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.blocks = eqx.filter_vmap(_Block)(jax.random.split(keys[1], LAYERS))
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[2])

    def __call__(self, ids: Any) -> Any:
        x = jax.vmap(jax.vmap(self.embed))(ids)
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @jax.checkpoint
        def body(x: Any, layer: Any) -> Any:
            return jax.vmap(eqx.combine(layer, static))(x), None

        x, _ = jax.lax.scan(body, x, arrays)
        return jax.vmap(jax.vmap(lambda x: self.head(self.norm(x))))(x)


def equinox() -> Case:
    params, static = eqx.partition(_Equinox(jax.random.key(0)), eqx.is_array)
    return Case(params, lambda p, ids: _loss(eqx.combine(p, static)(ids[:, :-1]), ids))


# Linen.


class _LinenBlock(linen.Module):
    product: Any = None

    @linen.compact
    def __call__(self, x: Any, _: Any) -> Any:
        attention = linen.MultiHeadDotProductAttention(
            HEADS,
            kernel_init=_normal,
            qkv_dot_general_cls=self.product,
            out_dot_general_cls=self.product,
        )
        x = x + attention(linen.LayerNorm()(x))
        up = linen.Dense(4 * WIDTH, kernel_init=_normal, dot_general_cls=self.product)
        down = linen.Dense(WIDTH, kernel_init=_normal, dot_general_cls=self.product)
        return x + down(linen.gelu(up(linen.LayerNorm()(x)))), None


class _Linen(linen.Module):
    product: Any = None

    @linen.compact
    def __call__(self, ids: Any) -> Any:
        x = linen.Embed(VOCABULARY, WIDTH, embedding_init=_normal)(ids)
        blocks = linen.scan(
            linen.remat(_LinenBlock, prevent_cse=False),
            # The second is where Flax's own 8-bit products keep their scales.
            variable_axes={"params": 0, "_overwrite_with_gradient": 0},
            split_rngs={"params": True},
            length=LAYERS,
        )
        x, _ = blocks(self.product)(x, None)
        head = linen.Dense(VOCABULARY, kernel_init=_normal, dot_general_cls=self.product)
        return head(linen.LayerNorm()(x))


def _same(net: Any) -> Any:
    return net


def linen_(product: Any = None, wrap: Callable[[Any], Any] = _same) -> Case:
    net = wrap(_Linen(product))
    params = net.init(jax.random.key(0), data()[:, :-1])
    return Case(params, lambda p, ids: _loss(net.apply(p, ids[:, :-1]), ids))


# NNX.


class _NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, kernel_init=_normal, rngs=rngs
        )
        self.first, self.second = (nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2))
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=_normal, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=_normal, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.first(x))
        return x + self.down(nnx.gelu(self.up(self.second(x))))


class _Nnx(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def blocks(rngs: nnx.Rngs) -> _NnxBlock:
            return _NnxBlock(rngs)

        self.embed = nnx.Embed(VOCABULARY, WIDTH, embedding_init=_normal, rngs=rngs)
        self.blocks = blocks(rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, kernel_init=_normal, rngs=rngs)

    def __call__(self, ids: Any) -> Any:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def body(x: Any, block: _NnxBlock) -> Any:
            return block(x)

        return self.head(self.norm(body(self.embed(ids), self.blocks)))


def nnx_(wrap: Callable[[Any], Any] = _same) -> Case:
    graph, params, rest = nnx.split(wrap(_Nnx(nnx.Rngs(0))), nnx.Param, ...)
    return Case(
        params, lambda p, ids: _loss(nnx.merge(graph, p, rest, copy=True)(ids[:, :-1]), ids)
    )


# Haiku.


def _haiku_block(x: Any) -> Any:
    init = hk.initializers.RandomNormal(0.02)
    hidden = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, model_size=WIDTH, w_init=init)
    x = x + attention(hidden, hidden, hidden)
    hidden = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    hidden = jax.nn.gelu(hk.Linear(4 * WIDTH, w_init=init)(hidden))
    return x + hk.Linear(WIDTH, w_init=init)(hidden)


def _haiku(ids: Any) -> Any:
    init = hk.initializers.RandomNormal(0.02)
    x = hk.Embed(VOCABULARY, WIDTH, w_init=init)(ids)
    stack: Any = hk.experimental  # pyright: ignore[reportPrivateImportUsage]
    x = stack.layer_stack(LAYERS)(hk.remat(_haiku_block))(x)
    x = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    return hk.Linear(VOCABULARY, w_init=init)(x)


def haiku() -> Case:
    net = hk.without_apply_rng(hk.transform(_haiku))
    params = net.init(jax.random.key(0), data()[:, :-1])
    return Case(params, lambda p, ids: _loss(net.apply(p, ids[:, :-1]), ids))


CASES: dict[str, Callable[[], Case]] = {
    "equinox": equinox,
    "linen": linen_,
    "nnx": nnx_,
    "haiku": haiku,
}
