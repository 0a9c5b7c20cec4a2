"""Persistent state: what survives from step to step and must never be narrowed by a cast.

Running statistics and averages change by amounts far below their own size. In 16 bits such an
update rounds away (an average stalls), and a variance above 65504 turns to infinity, so a cast of
a function's arguments leaves state alone. State is recognized by type where the framework has one
(`eqx.nn.State`, NNX variables other than `nnx.Param`) and by the names frameworks give it.
"""

import re
import sys
from typing import Any, NamedTuple

import equinox as eqx
import jax.tree_util as jtu

from halfstep._paths import path_string

STATE_NAMES = ("batch_stats", "mean_ema", "var_ema", "running_mean", "running_var")
"""Path components that mark state: Linen's collection, Haiku's averages, PyTorch's buffers."""

_STATE_NAME = re.compile(rf"(?:^|/)(?:{'|'.join(STATE_NAMES)})(?:/|$)")


class MarkedLeaf(NamedTuple):
    """A leaf, its path as text, and whether it is persistent state."""

    path: str
    leaf: Any
    is_state: bool


def is_state_node(node: Any) -> bool:
    """Whether a node of a tree is persistent state by its type."""
    if isinstance(node, eqx.nn.State):
        return True
    # NNX variables exist only once their user has imported Flax, which halfstep never does here.
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)


def variables_in(tree: Any) -> list[Any]:
    """The variables of NNX modules in a tree, which functions change in place."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    nodes = jtu.tree_leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [node for node in nodes if isinstance(node, nnx.Variable)]


def set_variable(variable: Any, value: Any) -> None:
    """Change a variable of an NNX module in place.

    Raises:
        ValueError: The variable belongs outside of the gradient function that is being traced.
    """
    try:
        variable.set_raw_value(value)
    except sys.modules["flax"].errors.TraceContextError as error:
        raise ValueError(
            f"the function changes a {type(variable).__name__} of an NNX module in place, and its "
            "new value cannot leave the gradient function. Use "
            "halfstep.integrations.nnx.value_and_grad, which takes modules in all arguments."
        ) from error


def marked_leaves(tree: Any, *, root: str = "") -> list[MarkedLeaf]:
    """The leaves of `tree` in JAX's order, each with its path and whether it is state."""
    marked: list[MarkedLeaf] = []
    for path, node in jtu.tree_flatten_with_path(tree, is_leaf=is_state_node)[0]:
        by_type = is_state_node(node)
        below = jtu.tree_flatten_with_path(node)[0] if by_type else [((), node)]
        for sub_path, leaf in below:
            text = path_string((*path, *sub_path), root=root)
            marked.append(MarkedLeaf(text, leaf, by_type or bool(_STATE_NAME.search(text))))
    return marked
