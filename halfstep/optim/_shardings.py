"""Where the state of an optimizer lies: as the parameters do."""

import math
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from halfstep._base import path_string
from halfstep.optim._layout import sharding_of
from halfstep.quant._groups import SIZE

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
    spec = []
    for size, part in zip(leaf.shape, sharding.spec, strict=False):
        names = part if isinstance(part, tuple) else () if part is None else (part,)
        parts = math.prod(sharding.mesh.shape[name] for name in names)
        spec.append(part if size % parts == 0 else None)
    if tuple(spec) == tuple(sharding.spec):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _is_alike(leaf: Any, param: Any) -> bool:
    """Whether an array has an axis for each of a parameter's: the same, or divided into groups."""
    if len(leaf.shape) != len(param.shape):
        return False
    pairs = zip(leaf.shape, param.shape, strict=True)
    return all(ours in (dim, -(-dim // SIZE), -(-dim // SIZE) * SIZE // 2) for ours, dim in pairs)
