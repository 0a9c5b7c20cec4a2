"""Find the mesh that a step is written for, and check that the target has as many devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from halfstep._preflight.preflight_errors import PreflightError
from halfstep._preflight.target.targets import Target

MeshLike = Mapping[str, int] | AbstractMesh | Mesh
"""A mesh, or the sizes of its axes: `{"data": 32, "model": 8}`."""


def as_mesh(mesh: MeshLike | None) -> AbstractMesh | Mesh | None:
    """Convert a user's mesh; axis sizes become a mesh without devices."""
    if isinstance(mesh, Mapping):
        # Sizes say nothing about axis types: the compiler divides arrays, as it always has. JAX's
        # own default differs between versions.
        types = (AxisType.Auto,) * len(mesh)
        return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=types)
    return mesh


def spread(shardings: object, args: tuple[Any, ...]) -> list[PartitionSpec | NamedSharding | None]:
    """Return a sharding, specification or `None` per leaf, from a prefix of the arguments' tree."""

    def is_spec(node: object) -> bool:
        return node is None or isinstance(node, PartitionSpec | NamedSharding)

    made: list[PartitionSpec | NamedSharding | None] = []

    def add(spec: Any, below: object) -> None:
        # One for each array. An argument that is `None`, or has `None` in it, has none for that.
        made.extend([spec] * len(jax.tree.leaves(below)))

    try:
        # As for `in_shardings` of `jax.jit`, a specification holds for everything below it in the
        # tree.
        jax.tree.map(add, shardings, args, is_leaf=is_spec)
    except ValueError as error:
        raise PreflightError(
            "`shardings` must be a prefix of the tree of `args`: give one PartitionSpec, "
            "NamedSharding or None for each argument, or for each part of it. JAX says:\n"
            f"{error}"
        ) from error
    return made


def find_mesh(
    mesh: AbstractMesh | Mesh | None, leaves: Sequence[tuple[str, Any]]
) -> AbstractMesh | Mesh | None:
    """Find the one mesh that all shardings are over, or `None` for a step on one device."""
    owner = "`mesh=`"
    for path, sharding in leaves:
        if not isinstance(sharding, NamedSharding):
            continue
        if mesh is None:
            mesh, owner = sharding.mesh, path
        elif dict(sharding.mesh.shape) != dict(mesh.shape):
            raise PreflightError(
                f"all arguments must be sharded over one mesh; {owner} is over "
                f"{dict(mesh.shape)} and {path} over {dict(sharding.mesh.shape)}. Make one "
                "mesh, and use it in all of their shardings."
            )
    return mesh


def check_mesh(axes: Mapping[str, int], target: Target) -> None:
    """Refuse a mesh that the target cannot hold."""
    count = math.prod(axes.values())
    # A target without a size is one device, and a step without a mesh is for one device.
    if not axes and target.sized and target.devices > 1:
        raise PreflightError(
            f"{target.name} has {target.devices} devices, but no argument is sharded over a "
            f'mesh. Write targets="{target.accelerator.name}" for a step on one device, or '
            "give `mesh=` and `shardings=`, or ShapeDtypeStructs with a NamedSharding."
        )
    if axes and count != target.devices:
        raise PreflightError(
            f"the mesh {dict(axes)} has {count} devices, but {target.name} has {target.devices}. "
            "Change the axis sizes of the mesh, or the size in the target's name "
            f'("{_suggest(target, count)}").'
        )


def _suggest(target: Target, devices: int) -> str:
    name = target.accelerator.name
    if target.accelerator.platform == "cuda":
        if devices == 1:
            return name
        return f"{name}:{devices}" if devices <= 8 else f"{name}:{devices // 8}x8"
    return f"{name}:AxB" if target.accelerator.tpu_dimensions == 2 else f"{name}:AxBxC"
