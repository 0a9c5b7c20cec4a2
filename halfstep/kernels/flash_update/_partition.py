"""Run a kernel on leaves that are divided among devices: each device updates its own part.

A compiler that divides a program among devices does not look into kernels. Unless it is told how to
divide them, it gathers every array. Groups never lie on two devices, so that no device needs data
from another.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfstep._base import varying_axes
from halfstep.quant import Groups

Flat = Callable[..., Sequence[jax.Array]]
"""An update of plain arrays. It takes the scalars, the gradient and the arrays of a leaf, the
parameter first, and returns the new arrays of the leaf."""


def alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Mark arrays inside `shard_map` as varying over the same axes of the mesh.

    JAX does this for the operands of its own operations, but not for those of a new primitive.
    """
    axes = [varying_axes(array) for array in arrays]
    every = frozenset[str]().union(*axes)
    return [
        jax.lax.pcast(array, tuple(sorted(every - own)), to="varying") if every - own else array
        for array, own in zip(arrays, axes, strict=True)
    ]


def may_be_divided() -> bool:
    """Return whether a compiler in this process may divide the traced program among devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return True
    # A program for a mesh without devices is compiled in another process: JAX knows no devices
    # here.
    return mesh.abstract_device is not None and set(mesh.manual_axes) != set(mesh.axis_names)


def explicit_sharding(array: jax.Array) -> NamedSharding | None:
    """Return how an array is divided among devices, if its type says so."""
    sharding = jax.typeof(array).sharding
    mesh = sharding.mesh
    if len(mesh.explicit_axes) == len(mesh.axis_names) and mesh.size > 1:
        # Every device has its part, or all of an array that is not divided.
        return sharding
    if not mesh.explicit_axes or all(axis is None for axis in sharding.spec):
        return None
    return sharding


def along_shards(
    update: Flat, arrays: Sequence[jax.Array], sharding: NamedSharding | None
) -> Sequence[jax.Array]:
    """Compute an update on each device separately.

    Args:
        update: The update.
        arrays: The arguments of the update.
        sharding: How the arrays of the leaf are divided; `None` if this is not known.
    """
    if sharding is None:
        return update(*arrays)
    specs = (PartitionSpec(), *[sharding.spec] * (len(arrays) - 1))
    mesh = sharding.mesh
    if mesh.explicit_axes:
        # Over explicit axes, JAX moves nothing by itself. A gradient with another sharding is moved
        # here.
        pairs = zip(arrays, specs, strict=True)
        arrays = [jax.sharding.reshard(array, NamedSharding(mesh, s)) for array, s in pairs]
    # Checks are off: Pallas does not interpret kernels that are checked, and here all arrays are
    # divided alike.
    divided = jax.shard_map(
        lambda *arrays: tuple(update(*arrays)),
        mesh=mesh,
        in_specs=specs,
        out_specs=specs[2:],
        check_vma=False,
    )
    return divided(*arrays)


Kind = Literal["whole", "scale", "packed"]
"""How an array of a leaf has the axis of groups: all of it, a scale for each group, or two codes in
a byte."""


def partitioned(
    update: Flat, shape: tuple[int, ...], groups: Groups, kinds: Sequence[Kind]
) -> Flat:
    """Return an update that runs on the devices that hold the leaf.

    Args:
        update: The update.
        shape: The shape of the leaf.
        groups: How the leaf is divided into groups.
        kinds: How each array of the leaf has the axis of groups.
    """

    def infer(
        mesh: Mesh, args: Sequence[jax.ShapeDtypeStruct], results: object
    ) -> list[NamedSharding]:
        del results
        return [_aligned(mesh, args[2].sharding, shape, groups)] * len(kinds)

    def divide(
        mesh: Mesh, args: Sequence[jax.ShapeDtypeStruct], results: object
    ) -> tuple[Mesh, Flat, list[NamedSharding], tuple[NamedSharding, ...]]:
        arrays = infer(mesh, args, results)
        return mesh, update, arrays, (args[0].sharding, arrays[0], *arrays)

    def rule(*_: object) -> tuple[str, dict[str, int | tuple[str, ...]]]:
        return _rule(shape, groups, kinds)

    made = custom_partitioning(update)
    made.def_partition(divide, infer_sharding_from_operands=infer, sharding_rule=rule)
    return made


def _aligned(
    mesh: Mesh, sharding: NamedSharding, shape: tuple[int, ...], groups: Groups
) -> NamedSharding:
    """Return the sharding for all arrays of a leaf, given that of its parameter.

    It is the same sharding, unless that would divide a group among devices.
    """
    # A device that has full groups, or all of the axis, needs no other device. Otherwise the axis
    # is gathered, which is slower but right.
    local = sharding.shard_shape(shape)[groups.axis]
    if local == shape[groups.axis] or local % groups.size == 0:
        return sharding
    axes = [*sharding.spec, *[None] * (len(shape) - len(sharding.spec))]
    axes[groups.axis] = None
    return NamedSharding(mesh, PartitionSpec(*axes))


def _rule(
    shape: tuple[int, ...], groups: Groups, kinds: Sequence[Kind]
) -> tuple[str, dict[str, int | tuple[str, ...]]]:
    """Return the rule for Shardy: the arrays of a leaf are divided alike, but never within a group.

    An axis of full groups is written as a product of two factors, `(axis within)`; scales have the
    first of them, and packed codes have `(axis half)`. The factors `within` and `half` are
    replicated, so that a group stays on one device.
    """
    names = [f"axis{i}" for i in range(len(shape))]
    leaf, scale, halves = list(names), list(names), list(names)
    is_packed = "packed" in kinds
    fixed = ("scalars",)
    sizes: dict[str, int] = {}
    if shape[groups.axis] % groups.size:
        leaf[groups.axis], scale[groups.axis], halves[groups.axis] = "ragged", "parts", "pairs"
        fixed = ("scalars", "ragged", "parts", *(("pairs",) if is_packed else ()))
    else:
        leaf[groups.axis] = f"({names[groups.axis]} within)"
        halves[groups.axis] = f"({names[groups.axis]} half)"
        fixed, sizes = ("scalars", "within"), {"within": groups.size}
        if is_packed:
            fixed, sizes = (*fixed, "half"), {**sizes, "half": groups.size // 2}
    forms = {"whole": leaf, "scale": scale, "packed": halves}
    arrays = [" ".join(forms[kind]) for kind in kinds]
    text = f"scalars, {', '.join([' '.join(leaf), *arrays])} -> {', '.join(arrays)}"
    return text, {**sizes, "need_replication_factors": fixed}
