"""One small network in every framework: dense, BatchNorm, dropout, dense. A row for each.

The networks are written in plain float32, as their frameworks teach it. A row says how to make its
network, how halfstep steps it, and how the framework steps it by itself.
"""

import abc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from flax import linen, nnx

import halfstep
from halfstep.integrations import nnx as mixed

FEATURES, HIDDEN, OUTPUTS, BATCH = 8, 16, 4, 32
RATE = 0.5
OPTIMIZER = optax.adam(1e-2)


class Train(NamedTuple):
    """What a step takes and gives back."""

    params: Any
    state: Any
    optimizer_state: Any


class Data(NamedTuple):
    """What a step reads."""

    x: jax.Array
    y: jax.Array
    key: jax.Array


class Report(NamedTuple):
    """What a step says about itself: `dropped` is the dropout mask of the hidden layer."""

    loss: jax.Array
    finite: Any
    grads: Any
    dropped: jax.Array


def mean_squared_error(output: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((output - y) ** 2)


class Row(abc.ABC):
    """One framework."""

    name: str

    @abc.abstractmethod
    def init(self, key: jax.Array) -> Train:
        """A fresh network, its state and its optimizer's state."""

    @abc.abstractmethod
    def step(
        self, data: Data, train: Train, scaling: Any, ledger: halfstep.Ledger, **options: Any
    ) -> tuple[Train, Any, halfstep.Ledger, Report]:
        """One step by halfstep."""

    @abc.abstractmethod
    def own_step(self, data: Data, train: Train) -> tuple[Train, Any]:
        """One float32 step by the framework and Optax alone; and its gradients."""

    def variances(self, train: Train) -> list[jax.Array]:
        """The running variance."""
        leaves = jtu.tree_flatten_with_path(train.state)[0]
        return [leaf for path, leaf in leaves if "var" in jtu.keystr(path) and leaf.ndim]


class FunctionalRow(Row):
    """A network as a pure function of parameters and state."""

    keep: Sequence[str] = ()

    @abc.abstractmethod
    def loss(self, params: Any, state: Any, x: Any, y: Any, key: Any, /) -> tuple[Any, Any]:
        """The loss and `(new state, dropout mask)`."""

    def step(
        self, data: Data, train: Train, scaling: Any, ledger: halfstep.Ledger, **options: Any
    ) -> tuple[Train, Any, halfstep.Ledger, Report]:
        gradient = halfstep.filter_value_and_grad(
            self.loss, scaling, has_aux=True, keep=self.keep, **options
        )
        (loss, (state, dropped)), scaling, finite, grads = gradient(
            train.params, train.state, data.x, data.y, data.key
        )

        def commit(train: Train) -> Train:
            params, optimizer_state = halfstep.apply_gradients(
                train.params, OPTIMIZER, train.optimizer_state, grads
            )
            return Train(params, state, optimizer_state)

        train, ledger = halfstep.transaction(finite, commit, train, ledger)
        return train, scaling, ledger, Report(loss, finite, grads, dropped)

    def own_step(self, data: Data, train: Train) -> tuple[Train, Any]:
        gradient = jax.value_and_grad(self.loss, has_aux=True)
        (_, (state, _)), grads = gradient(train.params, train.state, data.x, data.y, data.key)
        updates, optimizer_state = OPTIMIZER.update(grads, train.optimizer_state, train.params)
        return Train(optax.apply_updates(train.params, updates), state, optimizer_state), grads


class EquinoxNet(eqx.Module):
    dense: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array, *, mode: Any = "batch"):
        first, second = jax.random.split(key)
        self.dense = eqx.nn.Linear(FEATURES, HIDDEN, key=first)
        self.norm = eqx.nn.BatchNorm(HIDDEN, "batch", mode=mode)
        self.dropout = eqx.nn.Dropout(RATE)
        self.head = eqx.nn.Linear(HIDDEN, OUTPUTS, key=second)

    def __call__(self, x: Any, state: Any, key: Any) -> tuple[Any, Any, Any]:
        hidden, state = self.norm(self.dense(x), state)
        hidden = self.dropout(jnp.tanh(hidden), key=key)
        return self.head(hidden), state, hidden == 0


class Equinox(FunctionalRow):
    name = "equinox"

    def init(self, key: jax.Array) -> Train:
        model, state = eqx.nn.make_with_state(EquinoxNet)(key)
        return Train(model, state, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array)))

    def loss(self, params: Any, state: Any, x: Any, y: Any, key: Any, /) -> tuple[Any, Any]:
        batched = jax.vmap(params, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None, 0))
        output, state, dropped = batched(x, state, jax.random.split(key, BATCH))
        return mean_squared_error(output, y), (state, dropped)

    def own_step(self, data: Data, train: Train) -> tuple[Train, Any]:
        gradient = eqx.filter_value_and_grad(self.loss, has_aux=True)
        (_, (state, _)), grads = gradient(train.params, train.state, data.x, data.y, data.key)
        params = eqx.filter(train.params, eqx.is_inexact_array)
        updates, optimizer_state = OPTIMIZER.update(grads, train.optimizer_state, params)
        return Train(eqx.apply_updates(train.params, updates), state, optimizer_state), grads

    def variances(self, train: Train) -> list[jax.Array]:
        return [train.state.get(train.params.norm.batch_state_index)[1]]


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> tuple[Any, Any]:
        hidden = linen.Dense(HIDDEN)(x)
        hidden = linen.BatchNorm(use_running_average=False, momentum=0.9)(hidden)
        hidden = linen.Dropout(RATE, deterministic=False)(jnp.tanh(hidden))
        return linen.Dense(OUTPUTS)(hidden), hidden == 0


class Linen(FunctionalRow):
    name = "linen"

    def init(self, key: jax.Array) -> Train:
        rngs = {"params": key, "dropout": key}
        variables: Any = LinenNet().init(rngs, jnp.zeros((BATCH, FEATURES)))
        params = variables["params"]
        return Train(params, variables["batch_stats"], OPTIMIZER.init(params))

    def loss(self, params: Any, batch_stats: Any, x: Any, y: Any, key: Any, /) -> tuple[Any, Any]:
        (output, dropped), new = LinenNet().apply(
            {"params": params, "batch_stats": batch_stats},
            x,
            rngs={"dropout": key},
            mutable=["batch_stats"],
        )
        return mean_squared_error(output, y), (new["batch_stats"], dropped)


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(FEATURES, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(RATE, rngs=rngs)
        self.head = nnx.Linear(HIDDEN, OUTPUTS, rngs=rngs)

    def __call__(self, x: Any) -> tuple[Any, Any]:
        hidden = self.dropout(jnp.tanh(self.norm(self.dense(x))))
        return self.head(hidden), hidden == 0


def nnx_graph() -> Any:
    """The static half of `NnxNet`."""
    return nnx.graphdef(nnx.eval_shape(lambda: NnxNet(nnx.Rngs(0))))


class NnxFunctional(FunctionalRow):
    """NNX split into pure states, for `halfstep.filter_value_and_grad`."""

    name = "nnx-functional"

    def __init__(self) -> None:
        self.graph = nnx_graph()

    def init(self, key: jax.Array) -> Train:
        _, params, state = nnx.split(NnxNet(nnx.Rngs(key)), nnx.Param, ...)
        return Train(params, state, OPTIMIZER.init(params))

    def loss(self, params: Any, state: Any, x: Any, y: Any, key: Any, /) -> tuple[Any, Any]:
        model = nnx.merge(self.graph, params, state, copy=True)
        output, dropped = model(x)
        return mean_squared_error(output, y), (nnx.state(model, nnx.Not(nnx.Param)), dropped)


class NnxInPlace(Row):
    """NNX modules changed in place, by `halfstep.integrations.nnx`."""

    name = "nnx-in-place"

    def __init__(self) -> None:
        self.graph = nnx_graph()
        self.optimizer_graph = nnx.graphdef(
            nnx.eval_shape(lambda: nnx.Optimizer(NnxNet(nnx.Rngs(0)), OPTIMIZER, wrt=nnx.Param))
        )

    def init(self, key: jax.Array) -> Train:
        model = NnxNet(nnx.Rngs(key))
        _, params, state = nnx.split(model, nnx.Param, ...)
        return Train(params, state, nnx.state(nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)))

    def _objects(self, train: Train) -> tuple[Any, Any]:
        return (
            nnx.merge(self.graph, train.params, train.state),
            nnx.merge(self.optimizer_graph, train.optimizer_state),
        )

    def _train(self, model: Any, optimizer: Any) -> Train:
        _, params, state = nnx.split(model, nnx.Param, ...)
        return Train(params, state, nnx.state(optimizer))

    @staticmethod
    def loss(model: Any, x: Any, y: Any) -> tuple[Any, Any]:
        output, dropped = model(x)
        return mean_squared_error(output, y), dropped

    def step(
        self, data: Data, train: Train, scaling: Any, ledger: halfstep.Ledger, **options: Any
    ) -> tuple[Train, Any, halfstep.Ledger, Report]:
        model, optimizer = self._objects(train)
        gradient = mixed.value_and_grad(self.loss, scaling, has_aux=True, **options)
        (loss, dropped), scaling, finite, grads = gradient(model, data.x, data.y)
        mixed.optimizer_update(optimizer, model, grads, finite)
        report = Report(loss, finite, grads, dropped)
        return self._train(model, optimizer), scaling, ledger.record(finite), report

    def own_step(self, data: Data, train: Train) -> tuple[Train, Any]:
        model, optimizer = self._objects(train)
        _, grads = nnx.value_and_grad(self.loss, has_aux=True)(model, data.x, data.y)
        optimizer.update(model, grads)
        return self._train(model, optimizer), grads


def haiku_net(x: Any) -> tuple[Any, Any]:
    hidden = hk.Linear(HIDDEN)(x)
    hidden = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(hidden, True)
    hidden = hk.dropout(hk.next_rng_key(), RATE, jnp.tanh(hidden))
    return hk.Linear(OUTPUTS)(hidden), hidden == 0


class Haiku(FunctionalRow):
    """Haiku; its averages are recognized by their names."""

    name = "haiku"

    def __init__(self) -> None:
        self.net = hk.transform_with_state(haiku_net)

    def init(self, key: jax.Array) -> Train:
        params, state = self.net.init(key, jnp.zeros((BATCH, FEATURES)))
        return Train(params, state, OPTIMIZER.init(params))

    def loss(self, params: Any, state: Any, x: Any, y: Any, key: Any, /) -> tuple[Any, Any]:
        (output, dropped), state = self.net.apply(params, state, key, x)
        return mean_squared_error(output, y), (state, dropped)

    def variances(self, train: Train) -> list[jax.Array]:
        return [train.state["batch_norm/~/var_ema"]["average"]]


class HaikuKeep(Haiku):
    """Haiku, with its state kept by a rule."""

    name = "haiku-keep"
    keep = ("state",)


class Plain(FunctionalRow):
    """No framework: dictionaries of arrays."""

    name = "dict"

    def init(self, key: jax.Array) -> Train:
        first, second = jax.random.split(key)
        params = {
            "dense": {
                "w": jax.random.normal(first, (FEATURES, HIDDEN)) / FEATURES**0.5,
                "b": jnp.zeros(HIDDEN),
            },
            "norm": {"scale": jnp.ones(HIDDEN), "offset": jnp.zeros(HIDDEN)},
            "head": {
                "w": jax.random.normal(second, (HIDDEN, OUTPUTS)) / HIDDEN**0.5,
                "b": jnp.zeros(OUTPUTS),
            },
        }
        state = {"running_mean": jnp.zeros(HIDDEN), "running_var": jnp.ones(HIDDEN)}
        return Train(params, state, OPTIMIZER.init(params))

    def loss(self, params: Any, state: Any, x: Any, y: Any, key: Any, /) -> tuple[Any, Any]:
        hidden = x @ params["dense"]["w"] + params["dense"]["b"]
        mean, var = jnp.mean(hidden, axis=0), jnp.var(hidden, axis=0)
        state = {
            "running_mean": 0.9 * state["running_mean"] + 0.1 * mean,
            "running_var": 0.9 * state["running_var"] + 0.1 * var,
        }
        hidden = (hidden - mean) / jnp.sqrt(var + 1e-5)
        hidden = jnp.tanh(hidden * params["norm"]["scale"] + params["norm"]["offset"])
        alive = jax.random.bernoulli(key, 1 - RATE, hidden.shape)
        hidden = jnp.where(alive, hidden / (1 - RATE), 0)
        output = hidden @ params["head"]["w"] + params["head"]["b"]
        return mean_squared_error(output, y), (state, hidden == 0)


ROWS: Sequence[Row] = (
    Equinox(),
    Linen(),
    NnxFunctional(),
    NnxInPlace(),
    Haiku(),
    HaikuKeep(),
    Plain(),
)
BY_NAME = {row.name: row for row in ROWS}

POLICIES: dict[str, Callable[[], Any]] = {
    "f32": halfstep.NoLossScaling,
    "bf16": halfstep.NoLossScaling,
    "f16": lambda: halfstep.DynamicLossScaling(2.0**10),
}
"""Each policy with the loss scaling it is used with."""
