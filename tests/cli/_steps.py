"""What a user's module has: functions that make a step, right ones and wrong ones."""

from typing import Any

import jax
import jax.numpy as jnp

import halfstep

WIDTH = 32
not_a_function = 3


def make_step(policy: str = "f32", batch: int = 4) -> tuple[Any, Any]:
    """One step of gradient descent on a matrix, computed in the policy's dtype."""
    dtype = halfstep.Policy.parse(policy).compute

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.sum((x @ params["w"].astype(x.dtype)).astype(jnp.float32) ** 2)

        return jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(loss)(params))

    params = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
    x = jax.ShapeDtypeStruct((batch, WIDTH), dtype)
    return jax.jit(step, donate_argnums=0), (params, x)


def make_loud_step(batch: int = 4) -> tuple[Any, Any]:
    print("made a step")
    return make_step(batch=batch)


def make_any_step(**settings: Any) -> tuple[Any, Any]:
    return make_step(**settings)


def without_batch(policy: str) -> tuple[Any, Any]:
    return make_step(policy)


def with_depth(depth: int, batch: int = 4) -> tuple[Any, Any]:
    return make_step(batch=depth * batch)


def only_a_step() -> Any:
    return make_step()[0]


def swapped() -> tuple[Any, Any]:
    return make_step()[::-1]


def bare_argument() -> tuple[Any, Any]:
    step, (params, _) = make_step()
    return step, params


def fails() -> tuple[Any, Any]:
    raise ZeroDivisionError("in the user's own code")


def sharded_over_four() -> tuple[Any, Any]:
    step, (params, x) = make_step()
    kinds = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=kinds)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    return step, (params, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows))


def make_layers(policy: str = "bf16") -> tuple[Any, Any]:
    """Six layers by scan, whose activations are far larger than their weights."""

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            return x + jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(params: Any, x: Any) -> Any:
        return params - 0.1 * jax.grad(halfstep.autocast(loss, policy))(params, x)

    params = jax.ShapeDtypeStruct((6, 256, 256), jnp.float32)
    return jax.jit(step, donate_argnums=0), (params, jax.ShapeDtypeStruct((8192, 256), jnp.float32))


def batches() -> list[tuple[Any, Any]]:
    """Arguments of the step of `make_layers`."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        (0.1 * jax.random.normal(keys[i], (6, 256, 256)), jax.random.normal(keys[i + 2], (8, 256)))
        for i in range(2)
    ]
