"""Parameters as the optimizers see them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

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


def by_updates(tx: Any, params: Any, grads: Callable[[int, Any], Any], steps: int) -> Any:
    """Parameters and state after steps as Optax makes them: `update`, and its result applied."""
    state = tx.init(params)

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        params, state = step(params, state, grads(number, params))
    return params, state
