"""Parameters as the optimizers see them."""

from typing import Any

import jax
import jax.numpy as jnp

from halfstep import quant


def values(params: Any, state: Any) -> Any:
    """Float32 parameters: joined with what their state has of them."""
    leaves, treedef = jax.tree.flatten(params)
    lows = treedef.flatten_up_to(state.low)
    made = [
        leaf if low is None else quant.join(leaf, low)
        for leaf, low in zip(leaves, lows, strict=True)
    ]
    return treedef.unflatten([jnp.asarray(leaf) for leaf in made])
