"""Small steps whose reports have arguments of every role, fp8 products, and collectives."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import halfstep

WIDTH, HIDDEN, BATCH = 256, 512, 64

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def _array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def momentum() -> Step:
    """Two layers with momentum; products in bfloat16, and the layers recomputed."""
    params = {"up": _array(WIDTH, HIDDEN), "down": _array(HIDDEN, WIDTH)}

    @jax.checkpoint
    def layers(params: Any, x: Any) -> Any:
        hidden = jnp.tanh(x.astype(jnp.bfloat16) @ params["up"].astype(jnp.bfloat16))
        out = hidden @ params["down"].astype(jnp.bfloat16)
        return jnp.tanh(out.astype(jnp.float32))

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = jax.grad(lambda params: jnp.mean(layers(params, x) ** 2))(params)
        opt_state = jax.tree.map(lambda m, g: 0.9 * m + g, opt_state, grads)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, opt_state), opt_state

    return step, (params, dict(params), _array(BATCH, WIDTH))


def in_f8() -> Step:
    """One layer, by halfstep's own gradient."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            return jnp.mean((x @ params) ** 2)

        *_, grads = halfstep.filter_value_and_grad(loss, policy="f8")(params, x)
        return params - 0.1 * grads

    return step, (_array(WIDTH, WIDTH), _array(BATCH, WIDTH))


def over_four() -> Step:
    """Four devices that each have a part of a batch and of some weights."""
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def body(weights: Any, x: Any) -> Any:
        total = jax.lax.psum(jnp.sin(x).astype(jnp.bfloat16), "data").astype(jnp.float32)
        part = (weights * total[0]).astype(jnp.bfloat16)
        return total + jnp.sum(jax.lax.all_gather(part, "data").astype(jnp.float32))

    def step(weights: Any, x: Any) -> Any:
        return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)(
            weights, x
        )

    return step, (array(1024), array(1024))
