"""Norms of gradients, and gradients that are kept below one."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from halfstep._base import at_least_float32


def squares(grads: Any) -> Float32[Array, ""]:
    """The sum of the squares of all gradients, in float32."""
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(grads):
        real = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
        total = sum((jnp.sum(jnp.square(part.astype(jnp.float32))) for part in real), total)
    return total


def factor(norm: Float32[Array, ""], limit: Any) -> Float32[Array, ""]:
    """What makes a norm at most `limit`: 1 if it is."""
    limit = jnp.asarray(limit, jnp.float32)
    # Divided by what is not smaller: neither zero nor rounded above one.
    return limit / jnp.maximum(norm, limit)


def multiply(grads: Any, by: Any) -> Any:
    """Gradients times a factor, computed in float32 and of the dtypes that they had."""

    def of(leaf: Any) -> Any:
        wide = at_least_float32(leaf.dtype)
        return (leaf.astype(wide) * by.astype(wide)).astype(leaf.dtype)

    return jax.tree.map(of, grads)
