"""Describe the dimensions of a product's factors on each of its three legs."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.lax import DotDimensionNumbers
from jax.sharding import NamedSharding, PartitionSpec

from halfstep._autocast.f8.linear import explicit_sharding


# A product has three legs: forward, and the gradients of both factors. Each leg is a product of two
# of the three arrays (both factors and the cotangent), and sums over dimensions that were a
# factor's own on another leg. With roles instead of axis numbers, the same code computes all three
# legs of any `dot_general`: a leg only exchanges `summed` and `own`.
@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of one operand's dimensions: shared with the other, summed with it, or its own."""

    shared: tuple[int, ...]
    summed: tuple[int, ...]
    own: tuple[int, ...]

    def turned(self) -> "Roles":
        """Return the roles on the leg that sums over the factor's own dimensions."""
        return Roles(self.shared, self.own, self.summed)


def of_dot(dimension_numbers: DotDimensionNumbers, ndims: Sequence[int]) -> tuple[Roles, Roles]:
    """Return the roles of a `dot_general`'s factors."""
    (left_sum, right_sum), (left_batch, right_batch) = dimension_numbers
    made = []
    for summed, shared, ndim in (
        (left_sum, left_batch, ndims[0]),
        (right_sum, right_batch, ndims[1]),
    ):
        own = [axis for axis in range(ndim) if axis not in (*summed, *shared)]
        made.append(Roles(tuple(shared), tuple(summed), tuple(own)))
    return made[0], made[1]


def of_result(left: Roles, right: Roles, summed: int) -> Roles:
    """Return the roles of a cotangent on a leg that sums over one factor's own dimensions.

    Args:
        left: The roles of the first factor.
        right: The roles of the second factor.
        summed: The factor whose own dimensions are summed, 0 or 1.
    """
    shared = len(left.shared)
    of_left = tuple(range(shared, shared + len(left.own)))
    of_right = tuple(range(shared + len(left.own), shared + len(left.own) + len(right.own)))
    own, gone = (of_right, of_left) if summed == 0 else (of_left, of_right)
    return Roles(tuple(range(shared)), gone, own)


def dot(
    first: jax.Array,
    second: jax.Array,
    of_first: Roles,
    of_second: Roles,
    dtype: np.dtype,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """Multiply: shared dimensions come first, then the first factor's own, then the second's.

    Args:
        first: The first factor.
        second: The second factor.
        of_first: The roles of the first factor's dimensions.
        of_second: The roles of the second factor's dimensions.
        dtype: The dtype of the product.
        sharding: How the product is sharded, in the order of its dimensions; needed over explicit
            axes of a mesh, where the factors' own shardings may not determine it.
    """
    # A factor's own dimensions come out in ascending order.
    start = len(of_first.shared)
    order = [*range(start), *(start + place for place in _ranks(of_first.own))]
    start += len(of_first.own)
    order += [start + place for place in _ranks(of_second.own)]
    if sharding is not None:
        parts = [sharding.spec[order.index(place)] for place in range(len(order))]
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*parts))
    made = jax.lax.dot_general(
        first,
        second,
        ((of_first.summed, of_second.summed), (of_first.shared, of_second.shared)),
        preferred_element_type=dtype,
        out_sharding=sharding,
    )
    return _transposed(made, order)


def divided(like: jax.ShapeDtypeStruct, axes: Sequence[int]) -> NamedSharding | None:
    """Return the explicit sharding of a value, with its dimensions in another order."""
    sharding = explicit_sharding(like)
    if sharding is None:
        return None
    spec = [*sharding.spec, *[None] * (len(axes) - len(sharding.spec))]
    return NamedSharding(sharding.mesh, PartitionSpec(*(spec[axis] for axis in axes)))


def _ranks(axes: Sequence[int]) -> list[int]:
    return [sorted(axes).index(axis) for axis in axes]


def as_laid_out(value: jax.Array, axes: Sequence[int]) -> jax.Array:
    """Move dimensions to where they belong: dimension `i` goes to `axes[i]`."""
    return _transposed(value, sorted(range(len(axes)), key=lambda place: axes[place]))


def _transposed(value: jax.Array, order: Sequence[int]) -> jax.Array:
    return value if list(order) == list(range(value.ndim)) else jax.lax.transpose(value, order)


def beside(scale: jax.Array, roles: Roles, before: int, after: int) -> jax.Array:
    """Reshape a factor's scales, whose summed dimensions are 1, to the shape of the product.

    Args:
        scale: The scales.
        roles: The roles of the factor's dimensions.
        before: How many of the other factor's own dimensions come before its own.
        after: How many of them come after its own.
    """
    # Scales have size 1 in summed dimensions; otherwise they could not be taken out of the sum.
    # These dimensions are dropped, and the other factor's own dimensions take their place.
    kept = jax.lax.transpose(scale, (*roles.shared, *roles.own, *roles.summed))
    shape = kept.shape[: len(roles.shared) + len(roles.own)]
    split = len(roles.shared)
    return kept.reshape(*shape[:split], *(1,) * before, *shape[split:], *(1,) * after)


def as_rows(value: jax.Array, roles: Roles) -> jax.Array:
    """Return a factor as `[shared, own, summed]`."""
    moved = jax.lax.transpose(value, (*roles.shared, *roles.own, *roles.summed))
    split = len(roles.shared), len(roles.shared) + len(roles.own)
    shape = moved.shape
    sizes = [
        int(np.prod(part))
        for part in (shape[: split[0]], shape[split[0] : split[1]], shape[split[1] :])
    ]
    return moved.reshape(sizes)


def from_rows(rows: jax.Array, roles: Roles, shape: Sequence[int]) -> jax.Array:
    """Return a factor of a shape from its rows."""
    axes = (*roles.shared, *roles.own, *roles.summed)
    return as_laid_out(rows.reshape([shape[axis] for axis in axes]), axes)
