"""Groups: runs of elements along one axis that share a scale."""

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from halfstep._base import checked, type_of

SIZE = 32
"""The number of elements that share a scale."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """The division of an array along `axis`, counted from the end, into runs of `size` elements.

    Scales have the shape of the array with that axis divided, so that a sharding of the array
    shards its scales alike.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import quant

        groups = quant.Groups(axis=-1, size=16)
        assert groups.scale_shape((4, 64)) == (4, 4)
        small = quant.quantize(jnp.ones((4, 64)), groups=groups)
        assert small.scale.shape == (4, 4)
        ```
    """

    axis: int
    size: int = SIZE

    @checked
    def count(self, shape: Sequence[int]) -> int:
        """Return the number of groups along the axis."""
        if not -len(shape) <= self.axis < 0:
            raise ValueError(
                f"`shape` must have the axis of {self}, counted from the end; got {tuple(shape)}."
            )
        return math.ceil(shape[self.axis] / self.size)

    @checked
    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the scales of an array."""
        dims = list(shape)
        dims[self.axis] = self.count(shape)
        return tuple(dims)

    @checked
    def divided(self, value: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Give groups their own axis, which follows the divided axis.

        A last group that is not full is filled with zeros.
        """
        axis, shape = value.ndim + self.axis, value.shape
        if axis < 0:
            raise ValueError(f"`value` must have the axis of {self}; got {type_of(value)}.")
        missing = self.count(shape) * self.size - shape[axis]
        if missing:
            value = jnp.pad(value, [(0, missing if i == axis else 0) for i in range(value.ndim)])
        return value.reshape(*shape[:axis], self.count(shape), self.size, *shape[axis + 1 :])

    @checked
    def whole(self, value: Shaped[Array, "..."], shape: Sequence[int]) -> Shaped[Array, "..."]:
        """Undo `divided` for an array of this shape."""
        axis = len(shape) + self.axis
        full = (*shape[:axis], self.count(shape) * self.size, *shape[axis + 1 :])
        if value.size != math.prod(full):
            raise ValueError(
                f"`value` must be what `divided` makes of an array of shape {tuple(shape)}; got "
                f"{type_of(value)}."
            )
        value = value.reshape(full)
        return value if full == tuple(shape) else value[tuple(map(slice, shape))]

    @checked
    def aligned(self, scale: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
        """Give scales an axis of size one where `divided` has the axis of a group."""
        return jnp.expand_dims(scale, scale.ndim + self.axis + 1)


@checked
def groups_for(
    shape: Sequence[int], *, shards: Sequence[int] = (), size: int = SIZE
) -> Groups | None:
    """Choose how to divide an array so that no group lies on two devices.

    The second axis from the end is tried first. A TPU's tile of 8-bit values holds 32 rows, and
    neighbors in memory then belong to different groups, which every backend can load and reduce
    without moving elements between lanes.

    Args:
        shape: The shape of the array.
        shards: The number of parts into which devices divide each axis; 1 for all by default.
        size: The number of elements that share a scale.

    Returns:
        The groups. `None` if every axis is too short or is divided within a group, and for arrays
            without elements.

    Example:
        ```python
        from halfstep import quant

        assert quant.groups_for((64, 128)) == quant.Groups(axis=-2, size=32)
        # Over four devices a column has 16 rows on each; a row has all of its columns.
        assert quant.groups_for((64, 128), shards=(4, 1)) == quant.Groups(axis=-1, size=32)
        assert quant.groups_for((8,)) is None
        ```
    """
    shape, parts = tuple(shape), tuple(shards) or (1,) * len(shape)
    for name, given in (("shape", shape), ("shards", parts)):
        if min(given, default=0) < 0:
            raise ValueError(f"`{name}` must be integers, 0 or more; got {given}.")
    if len(parts) != len(shape):
        raise ValueError(
            f"`shards` must have a number for each axis of `shape`, {shape}; got {parts}."
        )
    if size < 1:
        raise ValueError(f"`size` must be 1 or more; got {size}.")
    if 0 in shape or 0 in parts:
        return None
    axes = (-2, -1, *range(-3, -len(shape) - 1, -1)) if len(shape) > 1 else (-1,)
    axes = [axis for axis in axes if -axis <= len(shape)]
    full = [axis for axis in axes if shape[axis] % (size * parts[axis]) == 0]
    ragged = [axis for axis in axes if parts[axis] == 1 and shape[axis] > size]
    # Full groups first: a last group that is not full is padded whenever it is read.
    chosen = [*full, *ragged]
    return Groups(chosen[0], size) if chosen else None


def groups_between(shape: Sequence[int], scale_shape: Sequence[int]) -> Groups | None:
    """Find the groups that an array was written with from the shape of its scales.

    Returns `None` if no groups fit.
    """
    axes = [axis for axis in range(-len(shape), 0) if tuple(shape) != tuple(scale_shape)]
    found = [axis for axis in axes if Groups(axis).scale_shape(shape) == tuple(scale_shape)]
    return Groups(found[0]) if found else None
