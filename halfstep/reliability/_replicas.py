"""Check that copies of an array on several devices are the same.

Each device computes its own copy of a replicated array. A bit that flips in the memory of one
device stays flipped, leaves a finite value, and raises no error. The copies drift apart, and from
then on the gradients of all devices are slightly wrong.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from halfstep._base import checked, device_sums, path_string, without_key_type

_SHOWN = 5


class ReplicaError(RuntimeError):
    """Copies of an array that must be the same are not.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep.reliability import ReplicaError, replica_check
        from jax.sharding import AxisType, NamedSharding, PartitionSpec

        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
        copies = [jax.device_put(jnp.full(4, d.id == 0, "f4"), d) for d in mesh.devices]
        everywhere = NamedSharding(mesh, PartitionSpec())
        w = jax.make_array_from_single_device_arrays((4,), everywhere, copies)
        try:
            replica_check({"w": w})
            found = ""
        except ReplicaError as error:
            found = str(error)
        # A single device has nothing to compare with.
        assert ("`w` on device 0" in found) == (jax.device_count() > 1)
        ```
    """


@checked
def replica_check(tree: Any, *, step: int | None = None) -> None:
    """Compare the copies of every array that is on several devices, bit by bit.

    Each device sums up the bits of its own copies, and the smallest and the largest sum over the
    copies are compared. The check reads the arrays once and sends a few bytes per array. Call it
    every hundred steps or so, on all processes. Arrays that are divided over all devices have no
    copies and are not checked.

    Args:
        tree: Any pytree, such as the state of a run. Leaves that are not arrays over a mesh are
            skipped.
        step: The number of the step, for the message.

    Raises:
        ReplicaError: If copies differ, on all processes. The message names the arrays, and the
            devices that differ from most.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        kind = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=kind)
        everywhere = NamedSharding(mesh, PartitionSpec())
        state = jax.device_put({"w": jnp.ones(8)}, everywhere)
        halfstep.reliability.replica_check(state, step=100)
        ```
    """
    meshes: dict[Mesh, list[tuple[str, jax.Array, tuple[str, ...]]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            mesh, axes = leaf.sharding.mesh, _copied_over(leaf.sharding)
            if axes and isinstance(mesh, Mesh):
                meshes.setdefault(mesh, []).append(
                    (path_string(path), without_key_type(leaf), axes)
                )
    for mesh, found in meshes.items():
        names, arrays, axes = zip(*found, strict=True)
        bad = np.flatnonzero(np.asarray(_compiled(mesh, axes, _specs(arrays))(*arrays)))
        if bad.size:
            told = [_tell(mesh, names[n], arrays[n], axes[n]) for n in bad[:_SHOWN]]
            when = "" if step is None else f" after step {step}"
            more = f" and {bad.size - _SHOWN} more arrays" if bad.size > _SHOWN else ""
            raise ReplicaError(
                f"copies differ{when}: {'; '.join(told)}{more}. Go back to the last checkpoint, "
                "leave the named devices out if it happens again, and look for host code or "
                "random numbers that differ between processes if all devices are named."
            )


def _copied_over(sharding: NamedSharding) -> tuple[str, ...]:
    used = {
        name
        for part in sharding.spec
        if part is not None
        for name in (part if isinstance(part, tuple) else (part,))
    }
    sizes = sharding.mesh.shape
    return tuple(name for name in sizes if name not in used and sizes[name] > 1)


def _specs(arrays: Sequence[jax.Array]) -> tuple[P, ...]:
    return tuple(a.sharding.spec for a in arrays if isinstance(a.sharding, NamedSharding))


@functools.lru_cache(maxsize=16)
def _compiled(
    mesh: Mesh, axes: tuple[tuple[str, ...], ...], specs: tuple[P, ...]
) -> Callable[..., jax.Array]:
    """Compile a function that returns, for each array, whether its copies differ."""

    def differ(*shards: jax.Array) -> jax.Array:
        flags = []
        for shard, over in zip(shards, axes, strict=True):
            sums = device_sums(shard)
            low, high = jax.lax.pmin(sums, over), jax.lax.pmax(sums, over)
            flags.append(jnp.any(low != high).astype(jnp.int32))
        # An array may be divided over some axes and copied over others. A difference in any of its
        # parts counts.
        return jax.lax.pmax(jnp.stack(flags), tuple(mesh.axis_names))

    # JAX's check is off: it assumes that an array is the same wherever its spec says that the array
    # is copied, but this is the question here.
    mapped = jax.shard_map(differ, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(mapped)


def _tell(mesh: Mesh, name: str, array: jax.Array, axes: tuple[str, ...]) -> str:
    """Name the devices whose copy differs from most other copies."""

    def sums(shard: jax.Array) -> jax.Array:
        return device_sums(shard).reshape((1,) * len(mesh.axis_names) + (2,))

    mapped = jax.shard_map(
        sums, mesh=mesh, in_specs=_specs([array]), out_specs=P(*mesh.axis_names), check_vma=False
    )
    found = multihost_utils.process_allgather(jax.jit(mapped)(array), tiled=True)
    numbers = np.asarray(found, np.uint64)
    digests = numbers[..., 0] << np.uint64(32) | numbers[..., 1]
    order = list(mesh.axis_names)
    last = [order.index(axis) for axis in axes]
    copies = np.moveaxis(digests, last, range(-len(last), 0))
    groups = copies.reshape(*copies.shape[: copies.ndim - len(last)], -1)
    odd = []
    for place in np.ndindex(groups.shape[:-1]):
        values, counts = np.unique(groups[place], return_counts=True)
        if len(values) > 1:
            # If two copies differ, nothing says which one is right, so both are named.
            usual = values[np.argmax(counts)] if counts.max() > 1 else None
            odd += [d for d in _devices_of(mesh, last, place) if digests[d] != usual]
    where = ", ".join(_name(mesh, place) for place in odd[:_SHOWN])
    more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
    return f"`{name}` on {where}{more}"


def _devices_of(mesh: Mesh, last: Sequence[int], place: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the places in the mesh of one group of copies."""
    rest = iter(place)
    index = [slice(None) if axis in last else next(rest) for axis in range(mesh.devices.ndim)]
    inside = np.arange(mesh.devices.size).reshape(mesh.devices.shape)[tuple(index)]
    found = np.unravel_index(np.ravel(inside), mesh.devices.shape)
    return [tuple(int(n) for n in row) for row in zip(*found, strict=True)]


def _name(mesh: Mesh, place: tuple[int, ...]) -> str:
    device = mesh.devices[place]
    axes = ", ".join(f"{name}={n}" for name, n in zip(mesh.axis_names, place, strict=True))
    return f"device {device.id} of process {device.process_index} ({axes})"
