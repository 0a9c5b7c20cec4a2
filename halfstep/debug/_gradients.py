"""A loss and its gradients in a policy, as training has them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from halfstep._base import path_string
from halfstep._policy import Policy
from halfstep._program import Graph
from halfstep._training import NoLossScaling, StaticLossScaling, filter_value_and_grad


class Gradients(NamedTuple):
    """A loss, and its gradients by path."""

    value: jax.Array
    gradients: dict[str, jax.Array]


def is_loss(graph: Graph, has_aux: bool) -> bool:
    """Whether a function returns one number, of which there is a gradient."""
    outs = [graph.aval(out) for out in graph.outputs]
    alone = len(outs) == 1 or (has_aux and outs)
    return bool(alone) and outs[0].shape == () and jnp.issubdtype(outs[0].dtype, jnp.floating)


def scaling_for(policy: Policy, scaling: Any) -> Any:
    """A loss scaling, if the user gives none."""
    if scaling is not None:
        return scaling
    is_narrow = policy.compute == np.dtype(np.float16)
    return StaticLossScaling(2.0**15) if is_narrow else NoLossScaling()


def gradients_of(
    func: Callable[..., Any], policy: Policy, scaling: Any, *, has_aux: bool
) -> Callable[..., Gradients]:
    """A function of a loss's arguments that returns its value and its gradients.

    Args:
        func: The loss.
        policy: In which it is computed.
        scaling: A loss scaling, or the state of the policy's recipe.
        has_aux: Whether the loss returns something else as well.
    """
    transform = filter_value_and_grad(
        func, scaling_for(policy, scaling), policy=policy, has_aux=has_aux
    )

    def made(*args: Any, **kwargs: Any) -> Gradients:
        value, _, _, grads = transform(*args, **kwargs)
        leaves, _ = jtu.tree_flatten_with_path(eqx.filter(grads, eqx.is_inexact_array))
        named = {path_string(path) or "params": leaf for path, leaf in leaves}
        return Gradients(value[0] if has_aux else value, named)

    return made
