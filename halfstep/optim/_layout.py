"""Which leaves are compressed, and how they are divided into groups."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from halfstep._base import match_rules, path_string
from halfstep.quant import Groups, groups_for

MIN_SIZE = 4096
"""Leaves with fewer elements stay float32: they are norms and biases, and save nothing."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the state of an optimizer is laid out: all that must be the same after a restart."""

    master_bits: int | None
    keep: tuple[str, ...]
    min_size: int
    scale_dtype: np.dtype

    def groups(self, params: Any) -> list[Groups | None]:
        """The groups of each leaf; `None` for those that are not compressed."""
        flat, _ = jax.tree_util.tree_flatten_with_path(params)
        kept = match_rules(self.keep, [path_string(path) for path, _ in flat], option="keep")
        return [
            None if is_kept else self._groups_of(leaf)
            for (_, leaf), is_kept in zip(flat, kept, strict=True)
        ]

    def _groups_of(self, leaf: Any) -> Groups | None:
        if not is_compressible(leaf) or np.size(leaf) < self.min_size:
            return None
        return groups_for(leaf.shape, shards=shards_of(leaf))


def is_compressible(leaf: Any) -> bool:
    """Whether a leaf is an array whose moments can be coded."""
    return getattr(leaf, "dtype", None) in (jnp.float32, jnp.bfloat16) and len(leaf.shape) > 0


def sharding_of(leaf: Any) -> NamedSharding | None:
    """Where a leaf lies, if that is known: of arrays, of shapes, and of traced values' types."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, Tracer):
        sharding = getattr(jax.typeof(leaf), "sharding", None)
    if not isinstance(sharding, NamedSharding) or sharding.mesh.empty:
        return None
    return sharding


def shards_of(leaf: Any) -> tuple[int, ...]:
    """Into how many parts each axis of a leaf is divided over devices."""
    sharding = sharding_of(leaf)
    if sharding is None:
        return (1,) * len(leaf.shape)
    sizes = sharding.mesh.shape
    axes = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
    return tuple(int(np.prod([sizes[name] for name in _names(axis)])) for axis in axes)


def _names(axis: Any) -> Sequence[str]:
    if axis is None or not isinstance(axis, str | tuple):
        return ()
    return (axis,) if isinstance(axis, str) else axis


def zeros(shape: Sequence[int], dtype: Any, like: Any) -> jax.Array:
    """Zeros that lie where a leaf lies."""
    sharding = sharding_of(like)
    if sharding is None:
        return jnp.zeros(tuple(shape), dtype)
    return jnp.zeros(tuple(shape), dtype, device=sharding)


def is_stochastic(rounding: str) -> bool:
    """Whether codes are rounded at random.

    Raises:
        ValueError: If it is no way to round.
    """
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"rounding must be 'nearest' or 'stochastic'; got {rounding!r}.")
    return rounding == "stochastic"
