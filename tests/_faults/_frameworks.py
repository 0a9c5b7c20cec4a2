"""Faults in models of Equinox and Flax, with halfstep's own step around them."""

from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import halfstep
from tests._faults._fault import Fault

HALF = jnp.float16


class _EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self):
        keys = jax.random.split(jax.random.key(0))
        self.first = eqx.nn.Linear(4, 8, key=keys[0])
        self.second = eqx.nn.Linear(8, 3, key=keys[1])

    def __call__(self, x):
        h = jax.nn.relu(self.first(x))
        return jnp.log(jax.nn.softmax(self.second(h) * 1e4))  # fault: Equinox, log of a softmax


def _equinox_loss(model, x):
    return -jnp.mean(jax.vmap(model)(x)[:, 0])


def _equinox():
    optimizer = optax.adam(1e-3)
    model = _EquinoxNet()

    def step(model, state, x):
        loss, grads = eqx.filter_value_and_grad(_equinox_loss)(model, x)
        updates, state = optimizer.update(grads, state)
        return eqx.apply_updates(model, updates), state, loss

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(jax.random.key(1), (8, 4))
    return step, (model, state, x)


def _equinox_adam():
    optimizer = optax.adam(1e-3)
    model = halfstep.cast_to_float16(_EquinoxNet())

    def loss_of(model, x):
        return jnp.mean(jax.vmap(lambda x: model.second(jax.nn.relu(model.first(x))))(x))

    def step(model, state, x):
        loss, grads = eqx.filter_value_and_grad(loss_of)(model, x)
        updates, state = optimizer.update(grads, state)  # fault: Equinox, epsilon of Adam
        return eqx.apply_updates(model, updates), state, loss

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    return step, (model, state, jnp.zeros((8, 4), HALF))


def _equinox_scaled():
    optimizer = optax.sgd(1e-3)
    model = _EquinoxNet()

    def loss_of(model, x):
        h = jax.vmap(model.first)(x)
        return jnp.mean(jnp.sqrt(jnp.sum(h * 0, axis=-1)))  # fault: Equinox, sqrt under a policy

    def step(model, state, scaling, x):
        grad = halfstep.filter_grad(loss_of, policy="f16", scaling=scaling)
        scaling, finite, grads = grad(model, x)
        model, state = halfstep.optimizer_update(model, optimizer, state, grads, finite)
        return model, state, scaling

    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x = jax.random.normal(jax.random.key(1), (8, 4))
    return step, (model, state, halfstep.DynamicLossScaling(), x)


class _LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.Dense(8, name="up")(x)
        h = h / jnp.std(h, axis=0)  # fault: Linen, standard deviation of one example
        return nn.Dense(3, name="down")(h)


def _linen():
    model = _LinenNet()
    x = jnp.ones((1, 4))
    params: Any = model.init(jax.random.key(0), jnp.ones((2, 4)))

    def loss_of(params: Any, x: Any) -> Any:
        out: Any = model.apply(params, x)
        return jnp.mean(out)

    def step(params, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    return step, (params, x)


class _LinenScan(nn.Module):
    @nn.compact
    def __call__(self, h, _):
        h = nn.Dense(4, use_bias=False)(h)
        return jnp.exp(h), None  # fault: Linen, in iteration 1 of a scan


def _linen_scan():
    layers = nn.scan(
        _LinenScan, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    x = jnp.ones((2, 4))
    params: Any = layers.init(jax.random.key(0), x, None)
    kernel = params["params"]["Dense_0"]["kernel"]
    params["params"]["Dense_0"]["kernel"] = (kernel * 0).at[1].set(100)

    def loss(params, x):
        return jnp.mean(jnp.tanh(layers.apply(params, x, None)[0]))

    return jax.value_and_grad(loss), (params, x)


class _NnxNet(nnx.Module):
    def __init__(self):
        self.up = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(8, 2, rngs=nnx.Rngs(1))

    def __call__(self, x):
        h = jnp.tanh(self.up(x))
        unit = h / jnp.linalg.norm(h * 0, axis=-1, keepdims=True)  # fault: NNX, norm of zero
        return self.down(unit)


def _nnx():
    graph, params = nnx.split(_NnxNet(), nnx.Param)[:2]

    def step(params, x):
        def loss(params):
            return jnp.mean(nnx.merge(graph, params)(x))

        loss_now, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss_now

    return step, (params, jnp.ones((2, 4)))


FRAMEWORKS = (
    Fault("Equinox, log of a softmax", _equinox, "forward", ("log",), framework="Equinox"),
    Fault("Equinox, epsilon of Adam", _equinox_adam, "update", ("div",), framework="Equinox"),
    Fault(
        "Equinox, sqrt under a policy", _equinox_scaled, "backward", ("div",), framework="Equinox"
    ),
    Fault(
        "Linen, standard deviation of one example", _linen, "forward", ("div",), framework="Linen"
    ),
    Fault(
        "Linen, in iteration 1 of a scan",
        _linen_scan,
        "forward",
        ("exp",),
        framework="Linen",
        turns=(1,),
    ),
    Fault("NNX, norm of zero", _nnx, "forward", ("div",), framework="NNX"),
)
