"""Stacks of equal layers as gradient release takes them, and a step that does not release."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from halfstep import optim


@dataclasses.dataclass(frozen=True)
class Stack:
    """A stack of layers, and what is outside."""

    name: str
    params: Any
    functions: Mapping[str, Callable[..., Any]]
    batch: Callable[[int], Any]
    """For so many examples."""
    sizes: Mapping[str, int]

    @property
    def count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))


def mlp(*, layers: int = 12, width: int = 1024, hidden: int = 4096) -> Stack:
    """Residual layers of two matrices."""

    def layer(params: Any, x: Any, outer: Any, batch: Any) -> Any:
        del outer, batch
        return x + jnp.tanh(x @ params["up"]) @ params["down"]

    params = {
        "outer": {},
        "layers": {
            "up": jax.ShapeDtypeStruct((layers, width, hidden), jnp.bfloat16),
            "down": jax.ShapeDtypeStruct((layers, hidden, width), jnp.bfloat16),
        },
    }
    functions = {
        "layer": layer,
        "first": lambda outer, batch: batch,
        "last": lambda outer, x, batch: jnp.mean(jnp.square(x.astype(jnp.float32))),
    }
    sizes = {"layers": layers, "width": width, "hidden": hidden}
    return Stack(
        "residual MLP",
        params,
        functions,
        lambda examples: jax.ShapeDtypeStruct((examples, width), jnp.bfloat16),
        sizes,
    )


def gradients_first(model: Stack, tx: Any) -> Callable[..., Any]:
    """A step without release: all gradients by a rematerialized scan, then update each layer."""
    first, layer, last = (model.functions[name] for name in ("first", "layer", "last"))

    def step(params: Any, state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            @jax.checkpoint
            def body(x: Any, one: Any) -> Any:
                return layer(one, x, params["outer"], batch), None

            x, _ = jax.lax.scan(body, first(params["outer"], batch), params["layers"])
            return last(params["outer"], x, batch)

        value, grads = jax.value_and_grad(loss)(params)

        def update(number: Any, stack: Any) -> Any:
            def one(tree: Any) -> Any:
                return jax.tree.map(
                    lambda leaf: jax.lax.dynamic_index_in_dim(leaf, number, keepdims=False), tree
                )

            made = tx.step(*one(stack), one(grads["layers"]))
            return jax.tree.map(
                lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, number, 0),
                stack,
                made,
            )

        length = model.sizes["layers"]
        stack = jax.lax.fori_loop(0, length, update, (params["layers"], state.layers))
        outer, outer_state = tx.step(params["outer"], state.outer, grads["outer"])
        made = {"outer": outer, "layers": stack[0]}
        return value, made, optim.ReleaseState(outer_state, stack[1])

    return step
