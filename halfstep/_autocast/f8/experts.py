"""Multiply the rows of each group by the group's own matrix, in blocks: the products of experts.

`jax.lax.ragged_dot` does so for numbers. XLA has no such operation for blocks with scales, and its
form for GPUs multiplies every row by the matrices of all groups. Here, rows are laid out in tiles,
so that no tile has rows of two groups, and the tiles are multiplied as a batch by the product of
`blocks`, each by the matrix of its group. The number of tiles depends on shapes only: each group
but the last adds at most one tile to as many as the rows fill.

The gradient of the matrices sums over rows. So its factors have their blocks along rows, and no
block may span two groups either: rows are spread out (`spread`) before they are encoded, so that
each group starts with a block. The tiles of this leg consist of whole blocks.

Devices other than one GPU decode the same blocks, and multiply them as `ragged_dot` does.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from halfstep._autocast.f8 import blocks
from halfstep._autocast.f8.blocks import Form
from halfstep._autocast.f8.dimensions import Roles, of_dot
from halfstep._policy import Factor, Leg
from halfstep.kernels._target import is_divided
from halfstep.quant._scaled import Blocks

_TILE = 128
"""The least number of rows of a tile: GPUs multiply as many at a time."""


def roles_of(
    name: str, params: Mapping[str, Any], shapes: Sequence[Sequence[Any]]
) -> tuple[Roles, Roles] | None:
    """Return the roles of the rows' and the matrices' dimensions.

    It returns `None` for all but a product that multiplies each of the rows by one of the matrices.

    Args:
        name: The name of the contraction.
        params: Its parameters.
        shapes: The shapes of both factors.
    """
    if name != "ragged_dot_general" or [len(shape) for shape in shapes] != [2, 3]:
        return None
    numbers = params["ragged_dot_dimension_numbers"]
    first, second = of_dot(numbers.dot_dimension_numbers, (2, 3))
    (group,) = numbers.rhs_group_dimensions or (None,)
    if first.shared or len(first.summed) != 1 or group not in second.own:
        return None
    own = tuple(axis for axis in second.own if axis != group)
    return first, Roles((group,), second.summed, own)


# The places of rows.


class _Places(NamedTuple):
    """Where the rows of each group are, in units that hold rows of one group only.

    `row` is `[unit, place in the unit]`, the row at each place, and `filled` tells which places
    hold one. `group` is the group of each unit, and `first` the first unit of each group.
    """

    row: jax.Array
    filled: jax.Array
    group: jax.Array
    first: jax.Array


def _most(rows: int, groups: int, unit: int) -> int:
    """Return how many units there are at most, whatever the sizes of groups are."""
    # The worst case are groups with one row more than fills their units.
    used = min(rows, groups)
    return (rows - used) // unit + used


def _ends(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Return the first row of each group, and the first row after each group."""
    ends = jnp.minimum(jnp.cumsum(sizes.astype(jnp.int32), dtype=jnp.int32), rows)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def _places(sizes: jax.Array, rows: int, unit: int, count: int) -> _Places:
    starts, ends = _ends(sizes, rows)
    units = (ends - starts + unit - 1) // unit
    last = jnp.cumsum(units, dtype=jnp.int32)
    number = jnp.arange(count, dtype=jnp.int32)
    # Units after the last group hold nothing: they lie behind the end of that group.
    group = jnp.minimum(_group_of(last, number), len(sizes) - 1)
    begin = starts[group] + (number - (last - units)[group]) * unit
    index = begin[:, None] + jnp.arange(unit, dtype=jnp.int32)[None]
    return _Places(index, index < ends[group][:, None], group, last - units)


def _group_of(ends: jax.Array, rows: jax.Array) -> jax.Array:
    """Return the number of groups that have ended before each row."""
    return jnp.sum(rows[:, None] >= ends[None], axis=1, dtype=jnp.int32)


def _place_of(sizes: jax.Array, rows: int, unit: int, first: jax.Array) -> tuple[Any, Any]:
    """Return the place of each row, and which rows belong to a group."""
    starts, ends = _ends(sizes, rows)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.minimum(_group_of(ends, row), len(sizes) - 1)
    return first[group] * unit + row - starts[group], row < ends[-1]


class Groups(NamedTuple):
    """Rows that belong to groups, each with a matrix of its own.

    Attributes:
        sizes: The number of rows of each group.
        rows: The number of all rows. Those after the last group belong to none.
    """

    sizes: jax.Array
    rows: int

    def used(self, value: jax.Array, factor: Factor | None, *, axis: int = 0) -> jax.Array:
        """Return rows with zeros in place of those of no group, if these change any scales.

        Args:
            value: The rows.
            factor: How they will be encoded.
            axis: The dimension of rows.
        """
        if factor is None or not factor.two_level:
            return value
        is_used = jnp.arange(self.rows) < jnp.sum(self.sizes)
        return jnp.where(jnp.expand_dims(is_used, 1 - axis), value, jnp.zeros((), value.dtype))

    def spread(self, value: jax.Array, leg: Leg | None, *, axis: int = 0) -> jax.Array:
        """Lay rows out so that each group starts with a block; zeros lie between groups.

        Rows of no group are left out.

        Args:
            value: The rows.
            leg: How both factors of the leg are encoded that sums over rows.
            axis: The dimension of rows.
        """
        unit = _unit(leg)
        if unit is None:
            return value
        found = _places(self.sizes, self.rows, unit, _most(self.rows, len(self.sizes), unit))
        index = jnp.where(found.filled, found.row, self.rows).ravel()
        return jnp.take(value, index, axis=axis, mode="fill", fill_value=0)

    def gathered(self, value: jax.Array, leg: Leg | None, *, axis: int) -> jax.Array:
        """Undo `spread`. Rows of no group are zero."""
        unit = _unit(leg)
        if unit is None:
            return value
        found = _places(self.sizes, self.rows, unit, _most(self.rows, len(self.sizes), unit))
        place, is_used = _place_of(self.sizes, self.rows, unit, found.first)
        index = jnp.where(is_used, place, value.shape[axis])
        return jnp.take(value, index, axis=axis, mode="fill", fill_value=0)

    def shape(self, shape: Sequence[Any], leg: Leg | None, *, axis: int) -> tuple[Any, ...]:
        """Return the shape of rows that are spread."""
        unit, made = _unit(leg), list(shape)
        if unit is not None:
            made[axis] = unit * _most(self.rows, len(self.sizes), unit)
        return tuple(made)

    def multiply(
        self,
        first: Blocks,
        second: Blocks,
        of_first: Factor,
        of_second: Factor,
        *,
        over_rows: bool,
        form: Form,
    ) -> jax.Array:
        """Multiply the rows of each group.

        Args:
            first: The first factor.
            second: The second factor.
            of_first: How the first factor is encoded.
            of_second: How the second factor is encoded.
            over_rows: Whether the product sums over the rows of each group, which both factors
                have, spread: `[1, own, row]`. The result is `[group, own of the first, own of the
                second]`. Otherwise the first factor has the rows, `[1, row, summed]`, the second
                the matrices, `[group, own, summed]`, and the result is `[row, own]`.
            form: How the product is computed.
        """
        way = _Way(form, self.rows, over_rows)

        def by(*operands: jax.Array) -> jax.Array:
            made: jax.Array = _experts.bind(*operands, self.sizes, way=way, mapped=())
            return made

        return blocks.multiply_arrays(by, first, second, of_first, of_second)


def _unit(leg: Leg | None) -> int | None:
    """Return the size of the blocks along rows; `None` if rows are not spread."""
    return leg[0].size if leg is not None and blocks.has_units(*leg) else None


# The products.


def _tile(rows: int, groups: int, width: int, other: int) -> int:
    """Return the number of rows of a tile.

    Small tiles read the matrices, and write their gradients, more often. Large ones have more
    padding, which is as wide as rows of both sides of a matrix are. Their bytes are about equal at
    the root below, as the program for a B200 has them. With more than half of a group's mean size
    as many rows would be padding as are not.

    Args:
        rows: The number of rows.
        groups: The number of groups.
        width: One side of a matrix.
        other: Its other side.
    """
    mean = rows / groups
    best = min(mean / 2, math.sqrt(2 * mean * width * other / (width + other)))
    return max(_TILE, 2 ** math.floor(math.log2(max(1.0, best))))


def padded(rows: int, groups: int, width: int, other: int) -> int:
    """Return the number of rows that tiles have, at most; see `_tile`."""
    tile = _tile(rows, groups, width, other)
    return tile * _most(rows, groups, tile)


@dataclasses.dataclass(frozen=True)
class _Way:
    """How a product is computed, apart from its operands."""

    form: Form
    rows: int
    over_rows: bool


_experts = Primitive("halfstep_experts")


def _tiled(*operands: jax.Array, way: _Way) -> jax.Array:
    """Multiply tiles."""
    return _sums_by_tiles(operands, way) if way.over_rows else _rows_by_tiles(operands, way)


def _rows_by_tiles(operands: Sequence[jax.Array], way: _Way) -> jax.Array:
    first, of_first, second, of_second, sizes = operands
    groups = len(sizes)
    tile = _tile(way.rows, groups, *second.shape[1:])
    found = _places(sizes, way.rows, tile, _most(way.rows, groups, tile))
    # Places between groups may hold any row: nobody reads their results.
    index = jnp.minimum(found.row, way.rows - 1)
    tiles = [_taken(value[0], index) for value in (first, of_first)]
    matrices = [_taken(value, found.group) for value in (second, of_second)]
    made = blocks.product(*tiles, *matrices, form=way.form)
    place, is_used = _place_of(sizes, way.rows, tile, found.first)
    made = _taken(made.reshape(-1, made.shape[-1]), jnp.where(is_used, place, 0))
    return jnp.where(is_used[:, None], made, jnp.zeros((), made.dtype))


def _sums_by_tiles(operands: Sequence[jax.Array], way: _Way) -> jax.Array:
    first, of_first, second, of_second, sizes = operands
    groups = len(sizes)
    tile = _tile(way.rows, groups, first.shape[1], second.shape[1])
    size = first.shape[2] // of_first.shape[2]
    starts, ends = _ends(sizes, way.rows)
    counts = (ends - starts + size - 1) // size
    count = first.shape[2] // size
    found = _places(counts, count, tile // size, _most(way.rows, groups, tile))
    index = jnp.minimum(found.row, count - 1)
    tiles: list[jax.Array] = []
    for elements, scale in ((first, of_first), (second, of_second)):
        own = elements.shape[1]
        # Places between groups may hold any scale, except NaN.
        taken = _blocks_of(elements[0].reshape(own, count, size), index, found.filled, 0)
        tiles.append(taken.reshape(-1, own, tile))
        tiles.append(_blocks_of(scale[0], index, found.filled, 1))
    form = dataclasses.replace(way.form, out=jnp.dtype(jnp.float32))
    made = blocks.product(*tiles, form=form)
    total = jnp.zeros((groups, *made.shape[1:]), jnp.float32)
    total = total.at[found.group].add(made, indices_are_sorted=True, mode="promise_in_bounds")
    return total.astype(way.form.out)


def _taken(value: jax.Array, index: jax.Array) -> jax.Array:
    return value.at[index].get(mode="clip")


def _blocks_of(value: jax.Array, index: jax.Array, filled: jax.Array, other: int) -> jax.Array:
    """Return `[tile, own, block]` of `[own, block]`, with another number in unfilled places."""
    taken = jnp.moveaxis(value.at[:, index].get(mode="clip"), 1, 0)
    lead = (filled.shape[0], 1, filled.shape[1])
    filled = jnp.broadcast_to(filled.reshape(*lead, *(1,) * (taken.ndim - 3)), taken.shape)
    return jax.lax.select(filled, taken, jnp.full_like(taken, other))


def _decoded(*operands: jax.Array, way: _Way) -> jax.Array:
    """Multiply decoded factors, as `ragged_dot` does."""
    first, of_first, second, of_second, sizes = operands
    left, right = (
        blocks.read_rows(value, scale, way.form.compute)
        for value, scale in ((first, of_first), (second, of_second))
    )
    if way.over_rows:
        size = first.shape[2] // of_first.shape[2]
        starts, ends = _ends(sizes, way.rows)
        sizes = (ends - starts + size - 1) // size * size
        factors = (left[0].T, right[0].T)
        numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    else:
        factors = (left[0], right.swapaxes(1, 2))
        numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0])
    with jax.named_scope(way.form.rounded):
        return jax.lax.ragged_dot_general(
            *factors, sizes, numbers, preferred_element_type=way.form.out
        )


_Product = Callable[..., jax.Array]
Mapped = tuple[tuple[int | None, ...], ...]
"""The axis of each operand, for each `vmap` around a product, the first one first."""


def _apply(run: Callable[..., jax.Array], *operands: jax.Array, way: _Way, mapped: Mapped) -> Any:
    made = functools.partial(run, way=way)
    for number, axes in enumerate(mapped):
        if run is _decoded:
            made = _over(made, axes, jax.vmap if number == 0 else _one_by_one)
        else:
            made = jax.vmap(made, in_axes=axes)
    return made(*operands)


def _over(func: _Product, axes: Sequence[int | None], mapped: Callable[..., _Product]) -> _Product:
    """Map a function over axes; JAX maps `ragged_dot` only if all of its operands are mapped."""

    def over(*operands: jax.Array) -> jax.Array:
        pairs = list(zip(operands, axes, strict=True))
        size = next(value.shape[axis] for value, axis in pairs if axis is not None)
        return mapped(func)(*(batching.bdim_at_front(v, axis, size) for v, axis in pairs))

    return over


def _one_by_one(func: _Product) -> _Product:
    # JAX does not map a `ragged_dot` twice.
    return lambda *operands: jax.lax.map(lambda values: func(*values), operands)


def _abstract(*avals: ShapedArray, way: _Way, mapped: Mapped) -> ShapedArray:
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    made = jax.eval_shape(functools.partial(_apply, _tiled, way=way, mapped=mapped), *shapes)
    varying = frozenset().union(*(getattr(aval, "vma", frozenset()) for aval in avals))
    found = avals[0].update(shape=made.shape, dtype=made.dtype, weak_type=False)
    # Inside a shard_map, the type says over which axes of the mesh the result varies.
    return found.update(vma=varying) if varying else found


def _batch(values: Sequence[Any], axes: Sequence[Any], *, way: _Way, mapped: Mapped) -> Any:
    found = tuple(axis if isinstance(axis, int) else None for axis in axes)
    return _experts.bind(*values, way=way, mapped=(*mapped, found)), 0


_lower_tiled = mlir.lower_fun(functools.partial(_apply, _tiled), multiple_results=False)
_lower_decoded = mlir.lower_fun(functools.partial(_apply, _decoded), multiple_results=False)


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, way: _Way, mapped: Mapped) -> Any:
    # Where the compiler divides the program it would gather the rows of all devices.
    lower = _lower_decoded if is_divided(ctx) else _lower_tiled
    return lower(ctx, *values, way=way, mapped=mapped)


_experts.def_impl(functools.partial(_apply, _tiled))
_experts.def_abstract_eval(_abstract)
batching.primitive_batchers[_experts] = _batch
mlir.register_lowering(_experts, _lower_decoded)
for platform in ("cpu", "cuda"):
    mlir.register_lowering(_experts, _lower, platform=platform)
