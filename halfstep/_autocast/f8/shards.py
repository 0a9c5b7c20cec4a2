"""Divide a product of blocks over the devices of a mesh, and multiply the blocks of one device.

XLA's partitioner cannot divide `jax.lax.scaled_dot`: XLA rewrites that operation before its
partitioner Shardy runs, and Shardy does not know the result ("Unable to convert MHLO to
StableHLO"). Here, the partitioner sees an operation that it does not know, and asks how to divide
it. Factors that have to be gathered are gathered as they are, elements and scales. Each device then
runs `__op$block_scaled_dot`, which is a kernel of cuDNN on a Blackwell GPU.

Preflight's worker loads this file alone. It therefore imports nothing but JAX.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

CALL = "CustomSPMDPartitioning"
"""The custom call that XLA's partitioner asks JAX about."""
_TARGET = "__op$block_scaled_dot"
_FLOATS = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_MICROSCALED, _TWO_LEVEL = 32, 16
RESULTS = ("bfloat16", "float32")
"""The dtypes of results."""

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Division:
    """How the blocks of one product are divided.

    `scattered` is the dimension of the result over which the devices that divide the sum share it,
    1 or 2; `None` if all of them get all of it.
    """

    batch: Axes
    rows: Axes
    columns: Axes
    summed: Axes
    scattered: int | None

    @property
    def specs(self) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """How both factors and the result are divided."""
        rows = self.summed if self.scattered == 1 else self.rows
        columns = self.summed if self.scattered == 2 else self.columns
        return (
            _spec(self.batch, self.rows, self.summed),
            _spec(self.batch, self.columns, self.summed),
            _spec(self.batch, rows, columns),
        )


def is_known(avals: Sequence[ShapedArray]) -> bool:
    """Return whether cuDNN multiplies these factors: elements and scales of both."""
    first, of_first, second, of_second = avals
    # Sizes may be symbols of `jax.export`.
    if not all(isinstance(size, int) and size for aval in avals for size in aval.shape):
        return False
    size = first.shape[2] // of_first.shape[2]
    if first.dtype == second.dtype == jnp.float4_e2m1fn:
        return size == _TWO_LEVEL and of_first.dtype == of_second.dtype == jnp.float8_e4m3fn
    # cuDNN has a kernel only if one factor is in e4m3.
    known = first.dtype in _FLOATS and second.dtype in _FLOATS
    return known and size == _MICROSCALED and jnp.float8_e4m3fn in (first.dtype, second.dtype)


def key(sizes: Sequence[int], out: str) -> str:
    """Return the name under which the partitioner asks about products over a mesh."""
    return f"halfstep_blocks:{out}:" + "x".join(map(str, sizes))


def refined(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes of a mesh with the same devices, whose axes cannot be divided any further.

    Shardy divides axes where it has to: 4 blocks over an axis of 8 devices, for example. Over this
    mesh, whole axes say so.
    """
    return tuple(prime for size in sizes for prime in _primes(size))


def _primes(size: int) -> Iterator[int]:
    prime = 2
    while size > 1:
        while size % prime == 0:
            yield prime
            size //= prime
        prime += 1


def mesh_of(sizes: Sequence[int]) -> AbstractMesh:
    """Return a mesh of such sizes; its axes have numbers for names."""
    return AbstractMesh(tuple(sizes), tuple(map(str, range(len(sizes)))))


def rule(avals: Sequence[ShapedArray]) -> str:
    """Return how the shardings of factors and of the result depend on each other, for Shardy.

    Rows consist of blocks, which may be divided, and of the elements of a block, which may not.
    """
    (batch, rows, length), (_, _, blocks) = avals[0].shape, avals[1].shape
    sizes = {"i": batch, "j": rows, "k": avals[2].shape[1], "l": blocks, "m": length // blocks}
    text = ", ".join(f"{name}={size}" for name, size in sizes.items() if name != "l" or blocks > 1)
    if blocks == 1:
        # Shardy refuses a part of a dimension whose size is 1.
        text += ", n=1"
        operands, reduced = "[i, j, m], [i, j, n], [i, k, m], [i, k, n]", " need_replication={m, n}"
    else:
        operands = "[i, j, lm], [i, j, l], [i, k, lm], [i, k, l]"
        reduced = " reduction={l} need_replication={m}"
    return f"#sdy.op_sharding_rule<({operands})->([i, j, k]) {{{text}}}{reduced}, custom>"


def divide(
    mesh: Any, first: Iterable[Any], second: Iterable[Any], out: Iterable[Any], sizes: Sequence[int]
) -> Division:
    """Decide how a product is divided, from what was decided for its factors and its result.

    Args:
        mesh: The mesh.
        first: The axes that divide the first factor's batch, rows and elements.
        second: The axes that divide the second factor's.
        out: The axes that divide the result's batch, rows and columns.
        sizes: The sizes of the batch, of both factors' rows, and the number of blocks of a row.
    """
    left, right, made = ([_axes(part) for part in parts] for parts in (first, second, out))
    batch = _fitting(mesh, sizes[0], made[0] or left[0] or right[0])
    summed = [axis for axis in left[2] if axis in right[2]]
    if not summed:
        # Only one factor is divided along the sum. The other one is cut to match, unless the axis
        # is needed elsewhere: the weights of FSDP are divided along an axis that divides rows, and
        # have to be gathered.
        busy = {*left[1], *right[1], *made[1], *made[2]}
        summed = [axis for axis in left[2] or right[2] if axis not in busy]
    # A block is never cut: a device has whole blocks.
    summed = _fitting(mesh, sizes[3], [axis for axis in summed if axis not in batch])
    used = {*batch, *summed}
    rows = _fitting(mesh, sizes[1], [a for a in made[1] or left[1] if a not in used])
    used |= {*rows}
    columns = _fitting(mesh, sizes[2], [a for a in made[2] or right[1] if a not in used])
    scattered = None
    if summed and made[1] == summed and _fitting(mesh, sizes[1], summed) == summed:
        rows, scattered = (), 1
    elif summed and made[2] == summed and _fitting(mesh, sizes[2], summed) == summed:
        columns, scattered = (), 2
    return Division(batch, rows, columns, summed, scattered)


def partition(out: str, mesh: Any, arguments: Sequence[Any], result: Any) -> Any:
    """Return the product of one device, and how its operands and its result are divided.

    Args:
        out: The dtype of the result.
        mesh: The mesh.
        arguments: Shapes of elements and scales of both factors, with their shardings.
        result: The result's shape, with its sharding.
    """
    first, of_first, second, _ = arguments
    sizes = (first.shape[0], first.shape[1], second.shape[1], of_first.shape[2])
    left, right, made = (value.sharding.spec for value in (first, second, result))
    found = divide(mesh, left, right, made, sizes)
    of_left, of_right, of_made = (NamedSharding(mesh, spec) for spec in found.specs)

    def on_device(*values: Any) -> jax.Array:
        made = product.bind(*values, out=np.dtype(out))
        if found.scattered is not None:
            return jax.lax.psum_scatter(
                made, found.summed, scatter_dimension=found.scattered, tiled=True
            )
        return jax.lax.psum(made, found.summed) if found.summed else made

    return mesh, on_device, of_made, (of_left, of_left, of_right, of_right)


def _axes(part: str | Axes | None) -> Axes:
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)


def _spec(*parts: Axes) -> PartitionSpec:
    return PartitionSpec(*(part or None for part in parts))


def _fitting(mesh: Any, size: int, axes: Sequence[str]) -> Axes:
    """Return the first axes, as many as divide a size."""
    found = tuple(axes)
    while found and size % int(np.prod([mesh.shape[axis] for axis in found])):
        found = found[:-1]
    return found


product = Primitive("halfstep_block_product")
"""The product of rows with rows on one device: `[batch, row of the first, row of the second]`."""


def abstract(
    first: ShapedArray, _: ShapedArray, second: ShapedArray, __: ShapedArray, *, out: np.dtype
) -> ShapedArray:
    """Return the type of a product."""
    made: ShapedArray = first.update(
        shape=(first.shape[0], first.shape[1], second.shape[1]), dtype=out
    )
    return made


def _lower(ctx: mlir.LoweringRuleContext, *values: Any, out: np.dtype) -> Any:
    del out  # It is the result's dtype.
    avals: Any = ctx.avals_in
    lower = jax.ffi.ffi_lowering(_TARGET, backend_config="", api_version=2)
    # The elements of both factors come first, then their scales.
    order = (0, 2, 1, 3)
    return lower(ctx.replace(avals_in=[avals[i] for i in order]), *(values[i] for i in order))


def lower_divided(ctx: mlir.LoweringRuleContext, *values: Any, out: np.dtype) -> Any:
    """Lower a product of blocks as the operation that XLA's partitioner asks JAX about."""
    avals: Any = ctx.avals_in
    context: Any = ctx.module_context
    name = key(sizes_of(context), str(out))
    attributes = {"sdy.sharding_rule": mlir.ir.Attribute.parse(rule(avals), context.context)}
    lower = jax.ffi.ffi_lowering(
        CALL, backend_config=name, api_version=2, extra_attributes=attributes
    )
    return lower(ctx, *values)


def sizes_of(context: mlir.ModuleContext) -> tuple[int, ...]:
    """Return the sizes of the mesh of a program that is being lowered, refined; none if unknown.

    JAX does not tell lowering rules the mesh, unless it is set (`jax.set_mesh`). But all meshes of
    8 devices are the same once they are refined, and so for every power of two.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return refined(mesh.axis_sizes)
    sizes = refined([getattr(context.axis_context, "num_devices", 1)])
    return sizes if set(sizes) == {2} else ()


product.def_abstract_eval(abstract)
mlir.register_lowering(product, _lower, platform="cuda")
