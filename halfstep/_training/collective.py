"""Agree on one verdict and one sum over named mesh axes, inside `shard_map`."""

from collections.abc import Sequence
from typing import Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, PyTree

from halfstep._base import at_least_float32, varying_axes, widest

T = TypeVar("T")

Reduction = Literal["sum", "mean"]


def vary(x: Array, axis_names: Sequence[str]) -> Array:
    """Mark a value as differing over the axes, so that JAX does not sum its cotangent by itself."""
    # `pcast` refuses axes over which a value varies already.
    missing = tuple(name for name in axis_names if name not in varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def vary_tree(tree: T, axis_names: Sequence[str]) -> T:
    """`vary` every inexact array of a tree."""
    if not axis_names:
        return tree
    return jtu.tree_map(lambda x: vary(x, axis_names) if eqx.is_inexact_array(x) else x, tree)


def _axis_size(axis_names: Sequence[str]) -> int:
    return int(np.prod([jax.lax.axis_size(name) for name in axis_names]))


def reduce_value(x: Array, axis_names: Sequence[str], reduction: Reduction) -> Array:
    """Sum or average a loss over the axes; a loss that is the same everywhere is left alone."""
    varying = varying_axes(x)
    # An empty set means either that the value is the same on all shards, or that nothing is
    # tracked. A value that does not vary is summed only in the second case.
    tracked = bool(varying) or _is_tracked(axis_names)
    axes = tuple(name for name in axis_names if name in varying or not tracked)
    if not axes:
        return x
    total = jax.lax.psum(x, axes)
    return total * (1 / _axis_size(axes)) if reduction == "mean" else total


def _is_tracked(axis_names: Sequence[str]) -> bool:
    # `vary` changes a value's type if and only if shard_map tracks which values vary.
    return bool(varying_axes(vary(jnp.zeros(()), axis_names)))


def reduce_gradients(
    grads: T,
    params: PyTree,
    axis_names: Sequence[str],
    dtype: np.dtype | None,
    reduction: Reduction,
) -> T:
    """Sum or average gradients over the axes on which their parameters are the same.

    A parameter that is itself sharded over an axis has its own gradient on each shard. This
    gradient is not summed over the axis (where `shard_map` tracks which values vary).

    Args:
        grads: Gradients, not yet summed.
        params: The parameters as they were given, before `vary_tree`.
        axis_names: Mesh axes.
        dtype: The dtype of the sum; `None` means float32, or the gradient's own dtype if wider.
        reduction: `"sum"` or `"mean"`.
    """

    def reduce(grad: Array, param: Array) -> Array:
        axes = tuple(name for name in axis_names if name not in varying_axes(param))
        if not axes:
            return grad
        # In float32 by default: sums of 16-bit gradients over many shards lose the small ones.
        wire = at_least_float32(grad.dtype) if dtype is None else dtype
        # Imaginary parts have no 16-bit format: complex gradients are summed as they are.
        wire = grad.dtype if jnp.issubdtype(grad.dtype, jnp.complexfloating) else wire
        total = jax.lax.psum(grad.astype(wire), axes)
        total = total.astype(widest((grad.dtype, wire)))
        return total * (1 / _axis_size(axes)) if reduction == "mean" else total

    return jtu.tree_map(reduce, grads, params)


def agree(flags: Array, axis_names: Sequence[str]) -> Array:
    """Return flags that hold only if they hold on every shard, by a single reduction."""
    if not axis_names:
        return flags
    # A minimum of integers, since JAX has no collective `and`.
    everywhere = jax.lax.pmin(vary(flags.astype(jnp.int32), axis_names), tuple(axis_names))
    return everywhere.astype(bool)
