"""What kind of thing a leaf of a tree is."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array or a scalar of JAX's or NumPy's."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is made of floating-point or complex numbers, Python's own included."""
    if isinstance(leaf, float | complex):
        return True
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_key(leaf: Any) -> bool:
    """Whether a leaf is made of typed PRNG keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
