"""A small step, and what is changed in it one at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import halfstep

WIDTH, HIDDEN, BATCH = 256, 512, 64

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def momentum(
    *,
    batch: int = BATCH,
    state: Any = jnp.float32,
    second: Any = jnp.bfloat16,
    remat: bool = True,
    bias: bool = False,
) -> Step:
    """Two layers with momentum; products in bfloat16, and the layers recomputed."""
    params = {"up": _array(WIDTH, HIDDEN), "down": _array(HIDDEN, WIDTH)}
    if bias:
        params["bias"] = _array(WIDTH)
    opt_state = {name: _array(*leaf.shape, dtype=state) for name, leaf in params.items()}

    def layers(params: Any, x: Any) -> Any:
        hidden = jnp.tanh(x.astype(jnp.bfloat16) @ params["up"].astype(jnp.bfloat16))
        out = hidden.astype(second) @ params["down"].astype(second)
        return jnp.tanh(out.astype(jnp.float32) + (params["bias"][None] if bias else 0))

    run = jax.checkpoint(layers) if remat else layers

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = jax.grad(lambda params: jnp.mean(run(params, x) ** 2))(params)
        opt_state = jax.tree.map(
            lambda m, g: (0.9 * m.astype(jnp.float32) + g).astype(m.dtype), opt_state, grads
        )
        return jax.tree.map(lambda p, m: p - 0.1 * m.astype(p.dtype), params, opt_state), opt_state

    return step, (params, opt_state, _array(batch, WIDTH))


def in_policy(policy: str) -> Step:
    """One layer, by halfstep's own gradient."""

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any, x: Any) -> Any:
            return jnp.mean((x @ params) ** 2)

        *_, grads = halfstep.filter_value_and_grad(loss, policy=policy)(params, x)
        return params - 0.1 * grads

    return step, (_array(WIDTH, WIDTH), _array(BATCH, WIDTH))


def over_four(*, wire: Any = jnp.bfloat16, gathers: int = 1) -> Step:
    """Four devices that each have a part of a batch and of some weights."""
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P("data")))

    def body(weights: Any, x: Any) -> Any:
        total = jax.lax.psum(jnp.sin(x).astype(wire), "data").astype(jnp.float32)
        for _ in range(gathers):
            # Each needs the one before: the compiler cannot make one of them.
            part = (weights * total[0]).astype(jnp.bfloat16)
            total = total + jnp.sum(jax.lax.all_gather(part, "data").astype(jnp.float32))
        return total

    def step(weights: Any, x: Any) -> Any:
        return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)(
            weights, x
        )

    return step, (array(1024), array(1024))
