"""What `print` shows of small states."""

from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.core import Tracer


def with_values(module: Any) -> str:
    """The text of a module in which arrays of one number are that number, where it is known."""
    return eqx.tree_pformat(jtu.tree_map(_number, module))


def _number(leaf: Any) -> Any:
    is_known = isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    if not is_known or leaf.ndim or leaf.is_deleted():
        return leaf
    # Of an array over several processes, each has the number if all have it.
    return leaf.item() if leaf.is_fully_addressable or leaf.is_fully_replicated else leaf
