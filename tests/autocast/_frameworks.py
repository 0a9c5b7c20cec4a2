"""Four small networks in four frameworks, in plain float32, as their frameworks teach it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import linen, nnx

BATCH, LENGTH, WIDTH, HEADS, OUTPUTS, SIDE = 8, 6, 16, 2, 4, 8
RATE = 0.25


class Model(NamedTuple):
    """A network as a function of its parameters and its state."""

    params: Any
    state: Any
    apply: Callable[..., tuple[Any, Any]]
    """From parameters, state, input and key to output and state."""


SHAPES = {
    "mlp": (BATCH, WIDTH),
    "cnn": (BATCH, SIDE, SIDE, 2),
    "transformer": (BATCH, LENGTH, WIDTH),
    "lstm": (BATCH, LENGTH, WIDTH),
}


# Equinox: a network is for one example.


class EquinoxCnn(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.conv = eqx.nn.Conv2d(2, WIDTH, 3, stride=2, padding=1, key=first)
        self.norm = eqx.nn.BatchNorm(WIDTH, "batch", mode="batch")
        self.head = eqx.nn.Linear(WIDTH, OUTPUTS, key=second)

    def __call__(self, x: Any, state: Any, key: Any) -> tuple[Any, Any]:
        hidden, state = self.norm(self.conv(jnp.moveaxis(x, -1, 0)), state)
        return self.head(jnp.mean(jax.nn.relu(hidden), axis=(1, 2))), state


class EquinoxTransformer(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, dropout_p=RATE, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=second)
        self.dropout = eqx.nn.Dropout(RATE)

    def __call__(self, x: Any, state: Any, key: Any) -> tuple[Any, Any]:
        first, second = jax.random.split(key)
        hidden = jax.vmap(self.norms[0])(x)
        x = x + self.attention(hidden, hidden, hidden, key=first)
        hidden = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return x + self.dropout(hidden, key=second), state


class EquinoxLstm(eqx.Module):
    cell: eqx.nn.LSTMCell
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.cell = eqx.nn.LSTMCell(WIDTH, WIDTH, key=first)
        self.head = eqx.nn.Linear(WIDTH, OUTPUTS, key=second)

    def __call__(self, x: Any, state: Any, key: Any) -> tuple[Any, Any]:
        start = jnp.zeros(WIDTH), jnp.zeros(WIDTH)
        (hidden, _), _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), start, x)
        return self.head(hidden), state


class EquinoxMlp(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        self.mlp = eqx.nn.MLP(WIDTH, OUTPUTS, 2 * WIDTH, 2, jax.nn.gelu, key=key)

    def __call__(self, x: Any, state: Any, key: Any) -> tuple[Any, Any]:
        return self.mlp(x), state


def equinox(name: str, key: jax.Array) -> Model:
    kinds = {
        "mlp": EquinoxMlp,
        "cnn": EquinoxCnn,
        "transformer": EquinoxTransformer,
        "lstm": EquinoxLstm,
    }
    params, state = eqx.nn.make_with_state(kinds[name])(key)

    def apply(params: Any, state: Any, x: Any, key: Any) -> tuple[Any, Any]:
        batched = jax.vmap(params, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
        return batched(x, state, jax.random.split(key, BATCH))

    return Model(params, state, apply)


# Linen.


class LinenMlp(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(2):
            x = linen.gelu(linen.Dense(2 * WIDTH)(x))
        return linen.Dense(OUTPUTS)(x)


class LinenCnn(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        x = linen.Conv(WIDTH, (3, 3), strides=2)(x)
        x = linen.BatchNorm(use_running_average=False, momentum=0.9)(x)
        return linen.Dense(OUTPUTS)(jnp.mean(linen.relu(x), axis=(1, 2)))


class LinenTransformer(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        attention = linen.MultiHeadDotProductAttention(
            HEADS, dropout_rate=RATE, deterministic=False
        )
        x = x + attention(linen.LayerNorm()(x))
        hidden = linen.gelu(linen.Dense(2 * WIDTH)(linen.LayerNorm()(x)))
        return x + linen.Dropout(RATE, deterministic=False)(linen.Dense(WIDTH)(hidden))


class LinenLstm(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        hidden: Any = linen.RNN(linen.LSTMCell(WIDTH))(x)
        return linen.Dense(OUTPUTS)(hidden[:, -1])


def linen_(name: str, key: jax.Array) -> Model:
    kinds = {"mlp": LinenMlp, "cnn": LinenCnn, "transformer": LinenTransformer, "lstm": LinenLstm}
    net = kinds[name]()
    variables: Any = dict(net.init({"params": key, "dropout": key}, jnp.zeros(SHAPES[name])))
    params = variables.pop("params")

    def apply(params: Any, state: Any, x: Any, key: Any) -> tuple[Any, Any]:
        return net.apply(
            {"params": params, **state}, x, rngs={"dropout": key}, mutable=["batch_stats"]
        )

    return Model(params, variables, apply)


# NNX.


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.second = nnx.Linear(2 * WIDTH, 2 * WIDTH, rngs=rngs)
        self.head = nnx.Linear(2 * WIDTH, OUTPUTS, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(nnx.gelu(self.second(nnx.gelu(self.first(x)))))


class NnxCnn(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(2, WIDTH, (3, 3), strides=2, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(WIDTH, OUTPUTS, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(jnp.mean(nnx.relu(self.norm(self.conv(x))), axis=(1, 2)))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, dropout_rate=RATE, decode=False, deterministic=False, rngs=rngs
        )
        self.norms = nnx.Dict(
            first=nnx.LayerNorm(WIDTH, rngs=rngs), second=nnx.LayerNorm(WIDTH, rngs=rngs)
        )
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norms["first"](x))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms["second"](x)))))


class NnxLstm(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(WIDTH, OUTPUTS, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        hidden: Any = self.rnn(x)
        return self.head(hidden[:, -1])


def nnx_(name: str, key: jax.Array) -> Model:
    kinds = {"mlp": NnxMlp, "cnn": NnxCnn, "transformer": NnxTransformer, "lstm": NnxLstm}
    graph, params, state = nnx.split(kinds[name](nnx.Rngs(key)), nnx.Param, ...)

    def apply(params: Any, state: Any, x: Any, key: Any) -> tuple[Any, Any]:
        model = nnx.merge(graph, params, state, copy=True)
        return model(x), nnx.state(model, nnx.Not(nnx.Param))

    return Model(params, state, apply)


# Haiku.


def haiku_mlp(x: Any) -> Any:
    return hk.nets.MLP([2 * WIDTH, 2 * WIDTH, OUTPUTS], activation=jax.nn.gelu)(x)


def haiku_cnn(x: Any) -> Any:
    x = hk.Conv2D(WIDTH, 3, stride=2)(x)
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, True)
    return hk.Linear(OUTPUTS)(jnp.mean(jax.nn.relu(x), axis=(1, 2)))


def haiku_transformer(x: Any) -> Any:
    init = hk.initializers.VarianceScaling()
    attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, model_size=WIDTH, w_init=init)
    hidden = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    x = x + hk.dropout(hk.next_rng_key(), RATE, attention(hidden, hidden, hidden))
    hidden = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
    hidden = hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(2 * WIDTH)(hidden)))
    return x + hk.dropout(hk.next_rng_key(), RATE, hidden)


def haiku_lstm(x: Any) -> Any:
    core = hk.LSTM(WIDTH)
    unrolled: Any = hk.dynamic_unroll(core, x, core.initial_state(BATCH), time_major=False)
    return hk.Linear(OUTPUTS)(unrolled[0][:, -1])


def haiku(name: str, key: jax.Array) -> Model:
    kinds = {
        "mlp": haiku_mlp,
        "cnn": haiku_cnn,
        "transformer": haiku_transformer,
        "lstm": haiku_lstm,
    }
    net = hk.transform_with_state(kinds[name])
    params, state = net.init(key, jnp.zeros(SHAPES[name]))

    def apply(params: Any, state: Any, x: Any, key: Any) -> tuple[Any, Any]:
        return net.apply(params, state, key, x)

    return Model(params, state, apply)


FRAMEWORKS: dict[str, Callable[[str, jax.Array], Model]] = {
    "equinox": equinox,
    "linen": linen_,
    "nnx": nnx_,
    "haiku": haiku,
}
