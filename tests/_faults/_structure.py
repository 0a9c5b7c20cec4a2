"""Faults inside loops, branches, shards, kernels and derivatives of one's own, in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

from tests._faults._fault import Fault

HALF = jnp.float16


def _layers(scales):
    return jnp.stack([jnp.eye(4) * scale for scale in scales])


def _in_scan():
    def block(h, w):
        h = jnp.exp(h @ w)  # fault: in iteration 3 of a scan
        return h / 10, None

    def loss(layers, x):
        return jnp.sum(jax.lax.scan(block, x, layers)[0])

    return jax.value_and_grad(loss), (_layers([1, 1, 1, 4000, 1]), jnp.ones((2, 4)))


def _in_scan_backward():
    def block(h, w):
        h = jnp.sqrt(h @ w) + 1  # fault: in iteration 2 of a scan, backward
        return h, None

    def loss(layers, x):
        return jnp.sum(jax.lax.scan(block, x, layers)[0])

    return jax.value_and_grad(loss), (_layers([1, 1, 0, 1]), jnp.ones((2, 4)))


def _in_remat():
    @jax.checkpoint
    def block(h, w):
        scores = h @ w
        return jnp.exp(scores), None  # fault: in a scan that is recomputed

    def loss(layers, x):
        return jnp.sum(jnp.log1p(jax.lax.scan(block, x, layers)[0]))

    return jax.value_and_grad(loss), (_layers([1, 0.1, 100]), jnp.ones((2, 4)))


def _in_nested_scans():
    def inner(h, w):
        return h * w / jnp.sum(h * w), None  # fault: in a scan within a scan

    def outer(h, ws):
        return jax.lax.scan(inner, h, ws)[0], None

    def loss(layers, x):
        return jnp.sum(jax.lax.scan(outer, x, layers)[0])

    layers = jnp.ones((3, 4)).at[1, 2].set(0)
    return jax.value_and_grad(loss), (layers, jnp.ones(2))


def _in_while():
    def loss(x):
        def grow(state):
            number, x = state
            return number + 1, x * x  # fault: in iteration 4 of a while loop

        return jax.lax.while_loop(lambda state: state[0] < 6, grow, (0, x))[1]

    return loss, (jnp.float32(100),)


def _in_cond():
    def risky(x):
        return jnp.sum(1 / x)  # fault: in a branch of a cond

    def loss(x, flag):
        return jax.lax.cond(flag, risky, lambda x: jnp.sum(x), x)

    return jax.value_and_grad(loss), (jnp.arange(3.0), True)


def _in_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def loss(w, x):
        h = jnp.log(x @ w)  # fault: on shard 2 of a shard_map
        return jax.lax.pmean(jnp.mean(h), "data")

    x = jnp.ones((8, 2)).at[5].set(0)
    return jax.value_and_grad(loss), (jnp.ones(2), x)


def _in_custom_vjp():
    @jax.custom_vjp
    def clipped(x):
        return jnp.maximum(x, 0.0)

    def forward(x):
        return clipped(x), x

    def backward(x, g):
        return (g * x / x,)  # fault: in the backward function of a custom_vjp

    clipped.defvjp(forward, backward)

    def loss(w, x):
        return jnp.sum(clipped(x * w))

    return jax.value_and_grad(loss), (jnp.ones(3), jnp.arange(3.0))


def _in_pallas():
    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.log(x_ref[...])

    def loss(x):
        h = x - 1
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y = pl.pallas_call(kernel, out_shape=shape, interpret=True)(h)  # fault: in a Pallas kernel
        return jnp.sum(y)

    return loss, (jnp.arange(1.0, 9.0).reshape(1, 8),)


def _behind_a_skip():
    def step(w, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.sqrt(x * w)))(w)  # fault: behind update or skip
        finite = jnp.isfinite(grads).all()
        return jax.lax.cond(finite, lambda w: w - 0.1 * grads, lambda w: w, w)

    return step, (jnp.ones(3), jnp.arange(3.0))


def _sharded_batch():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, P("data"))

    def loss(w, x):
        h = x @ w
        return jnp.mean(h / jnp.linalg.norm(x, axis=-1))  # fault: in a sharded batch

    x = jax.device_put(np.eye(8, dtype=np.float32)[:, :4], rows)
    return jax.value_and_grad(loss), (jnp.ones(4), x)


STRUCTURE = (
    Fault("in iteration 3 of a scan", _in_scan, "forward", ("exp",), turns=(3,)),
    Fault(
        "in iteration 2 of a scan, backward", _in_scan_backward, "backward", ("div",), turns=(2,)
    ),
    Fault("in a scan that is recomputed", _in_remat, "forward", ("exp",), turns=(2,)),
    Fault("in a scan within a scan", _in_nested_scans, "forward", ("div",), turns=(1, 2)),
    Fault("in iteration 4 of a while loop", _in_while, "forward", ("mul",), turns=(4,)),
    Fault("in a branch of a cond", _in_cond, "forward", ("div",)),
    Fault("on shard 2 of a shard_map", _in_shard_map, "forward", ("log",), shard=2, devices=4),
    Fault("in the backward function of a custom_vjp", _in_custom_vjp, "backward", ("div",)),
    Fault("in a Pallas kernel", _in_pallas, "forward", ("pallas_call",)),
    Fault("behind update or skip", _behind_a_skip, "backward", ("div",)),
    Fault("in a sharded batch", _sharded_batch, "forward", ("div",), devices=4),
)
