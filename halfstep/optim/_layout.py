"""The layout of a state: which leaves are compressed, in which groups, and on which devices."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from halfstep._base import match_rules, path_string
from halfstep.quant import Groups, groups_for
from halfstep.quant._groups import SIZE

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
    axes = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
    return tuple(_parts(sharding, axis) for axis in axes)


def _parts(sharding: NamedSharding, axis: Any) -> int:
    """Into how many parts an entry of a sharding's spec divides an axis."""
    names = (axis,) if isinstance(axis, str) else axis if isinstance(axis, tuple) else ()
    return math.prod(sharding.mesh.shape[name] for name in names)


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


_PARTS = ("codes", "scale")


def state_shardings(state: Any, params: Any) -> Any:
    """Shardings for an optimizer's state, derived from those of the parameters.

    For `out_shardings` of a compiled `init` or `prepare`, and to restore a checkpoint onto another
    mesh. What belongs to a parameter, its codes and its scales too, is sharded as it is; the rest,
    such as a count, is on every device. So are scales along an axis that has too few of them to be
    divided.

    Args:
        state: A state or its shapes, as `jax.eval_shape(optimizer.init, params)` gives them. Any
            optimizer's, as long as what belongs to a parameter has the parameter's path in it.
        params: Parameters, or `jax.ShapeDtypeStruct`s with shardings over a mesh.

    Returns:
        A tree like `state`, of `NamedSharding`s.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import optim
        from jax.sharding import NamedSharding, PartitionSpec

        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        where = NamedSharding(mesh, PartitionSpec("data"))
        params = {"w": jax.ShapeDtypeStruct((128, 64), jnp.bfloat16, sharding=where)}
        optimizer = optim.flash_adamw(1e-3)
        shapes = jax.eval_shape(optimizer.init, params)
        shardings = optim.state_shardings(shapes, params)
        assert shardings.first["w"].scale.spec == PartitionSpec("data")
        ```
    """
    found = {
        path_string(path): (leaf, sharding_of(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    meshes = {sharding.mesh for _, sharding in found.values() if sharding is not None}
    if len(meshes) != 1:
        raise ValueError(
            "parameters must have shardings over one mesh; got "
            f"{len(meshes) or 'no'} mesh{'es' if len(meshes) != 1 else ''}. Give arrays, or "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))."
        )
    everywhere = NamedSharding(meshes.pop(), PartitionSpec())

    def of(path: Any, leaf: Any) -> NamedSharding:
        names = path_string(path).split("/")
        names = names[:-1] if names[-1] in _PARTS else names
        # The longest path first: `layers/w` before `w`.
        for start in range(len(names)):
            param, sharding = found.get("/".join(names[start:]), (None, None))
            if param is not None and sharding is not None and _is_alike(leaf, param):
                return _that_fits(leaf, sharding)
        return everywhere

    return jax.tree_util.tree_map_with_path(of, state)


def _that_fits(leaf: Any, sharding: NamedSharding) -> NamedSharding:
    """The sharding without the axes that an array cannot be divided over, such as few scales."""
    pairs = zip(leaf.shape, sharding.spec, strict=False)
    spec = [axis if size % _parts(sharding, axis) == 0 else None for size, axis in pairs]
    if tuple(spec) == tuple(sharding.spec):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _is_alike(leaf: Any, param: Any) -> bool:
    """Whether an array has an axis for each of a parameter's: the same, or divided into groups."""
    if len(leaf.shape) != len(param.shape):
        return False
    pairs = zip(leaf.shape, param.shape, strict=True)
    return all(ours in (dim, -(-dim // SIZE), -(-dim // SIZE) * SIZE // 2) for ours, dim in pairs)
