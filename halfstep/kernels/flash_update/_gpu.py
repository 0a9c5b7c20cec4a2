"""Compute the update in one kernel for Hopper and later GPUs, in Pallas by way of Mosaic GPU.

| leaf | computed by |
|---|---|
| groups of full size along the last axis but one, 128 n columns | this kernel |
| groups along an earlier axis, if the axes after it have 128 n elements | this kernel |
| groups along the last axis, partial groups, other numbers of columns | XLA (`_xla_gpu`) |
| moments of 4 bits, which are always rounded at random | this kernel |
| other random rounding | XLA (`_xla_gpu`) |
| Ampere and Ada GPUs, JAX before 0.12, exports for an unknown GPU | XLA (`_xla_gpu`) |

A block is one group of 32 rows and up to 512 columns, for the 128 threads of a warpgroup. Every
thread has full groups, so that no thread needs another thread's values. The block reads its rows
twice, first for the new scales and then for everything else. The second time, the rows are still in
the cache.

Mosaic GPU can be lowered for Ampere too, but only in a process that has such a GPU: without one, it
assumes Hopper, and LLVM then ends the process. JAX 0.10 lacks the square root in Mosaic GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from halfstep.kernels._target import Capability
from halfstep.kernels.flash_update._block import (
    SCALES,
    View,
    chances,
    refusal as common_refusal,
    reshaped,
    view_of,
)
from halfstep.kernels.flash_update._rule import (
    HasType,
    Leaf,
    Moments,
    Scalars,
    Spec,
    leaf_of,
    updated,
)
from halfstep.quant._codes import Code, scale_of
from halfstep.quant._nibbles import nibble
from halfstep.quant._split import joined, parted, widened

HOPPER = (9, 0)
_JAX = (0, 12)
# Hopper and data-center Blackwell: the first numbers of their compute capabilities.
_GENERATIONS = (9, 10)
# The columns of a block: 4, 2 or 1 for each of the 128 threads.
_WIDTHS = (512, 256, 128)
_AXES = ("lead", "group", "column")


def refusal_of_gpu(capability: Capability | None) -> str | None:
    """Return why the kernel is not used on a GPU, or `None` if it is.

    Args:
        capability: The compute capability; `None` if it is not known.
    """
    if jax.__version_info__ < _JAX:
        return f"takes JAX 0.12 or later; got {jax.__version__}"
    if capability is None:
        return "takes a known GPU; got a program that is exported for any of them"
    if capability[0] not in _GENERATIONS:
        number = ".".join(map(str, capability))
        return f"takes GPUs of compute capability 9 and 10 (Hopper, Blackwell); got {number}"
    return None


def refusal(leaf: Leaf, grad: HasType, spec: Spec) -> str | None:
    """Return why the kernel does not take a leaf, or `None` if it does."""
    reason = common_refusal(leaf, grad, spec)
    if reason is not None:
        return reason
    view = view_of(leaf.param.shape, spec.groups)
    if spec.stochastic:
        return "rounds codes of 8 bits and parameters to the nearest; got random rounding"
    if view.groups.axis != -2 or view.is_ragged or view.shape[2] % _WIDTHS[-1]:
        return (
            f"takes full groups of {view.groups.size} rows with a multiple of {_WIDTHS[-1]} "
            f"columns; got {spec.groups} of shape {list(leaf.param.shape)}"
        )
    return None


def update(
    leaf: Leaf, grad: jax.Array, by: jax.Array, spec: Spec, *, interpret: bool = False
) -> Leaf:
    """Return a leaf after one step.

    Args:
        leaf: The parameter and its state. All arrays are overwritten in place.
        grad: The gradient, in its own dtype.
        by: The hyperparameters, in one array.
        spec: The optimizer, and how its state is stored.
        interpret: Whether to run the kernel as JAX, on any machine.
    """
    view = view_of(leaf.param.shape, spec.groups)
    arrays = view.arrays(leaf, spec)
    grad = grad.reshape(view.shape)
    width = next(width for width in _WIDTHS if view.shape[2] % width == 0)
    grid = (view.shape[0], view.shape[1] // view.groups.size, view.shape[2] // width)
    block = _block(view, width, leaf.present, spec)
    run = _interpreted if interpret else _compiled
    return reshaped(run(block, grid, by, grad, arrays), leaf)


Block = Callable[..., None]
"""Updates one block, given its place in the grid, all inputs and all outputs."""


def _compiled(
    block: Block, grid: tuple[int, ...], by: jax.Array, grad: jax.Array, arrays: list[jax.Array]
) -> Sequence[jax.Array]:
    # Imported here: Pallas takes a second to import, and most programs do not need it.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def kernel(by_ref: jax.Ref, grad_ref: jax.Ref, *refs: jax.Ref) -> None:
        place = tuple(map(jax.lax.axis_index, _AXES))
        # The update is in place: the references are read and written. A block reads a row twice
        # before it writes the row, and no other block touches that row.
        block(place, by_ref, grad_ref, refs, refs)

    refs = [jax.new_ref(array) for array in arrays]
    call = plgpu.kernel(kernel, grid=grid, grid_names=_AXES, kernel_name="flash_update")
    call(by, grad, *refs)
    return [jax.freeze(ref) for ref in refs]


def _interpreted(
    block: Block, grid: tuple[int, ...], by: jax.Array, grad: jax.Array, arrays: list[jax.Array]
) -> Sequence[jax.Array]:
    from jax.experimental import pallas as pl

    def kernel(by_ref: jax.Ref, grad_ref: jax.Ref, *refs: jax.Ref) -> None:
        place = tuple(map(pl.program_id, range(len(grid))))
        block(place, by_ref, grad_ref, refs[: len(arrays)], refs[len(arrays) :])

    return pl.pallas_call(
        kernel,
        [jax.typeof(array) for array in arrays],
        grid=grid,
        input_output_aliases={2 + i: i for i in range(len(arrays))},
        interpret=True,
        name="flash_update",
    )(by, grad, *arrays)


def _block(view: View, width: int, present: tuple[int, ...], spec: Spec) -> Block:
    from jax.experimental import pallas as pl

    size = view.groups.size
    # Where two codes share a byte, an iteration takes two rows: one of each half of a group.
    parts = 2 if spec.packed else 1
    turns = size // parts

    def block(
        place: tuple[jax.Array, ...],
        by_ref: jax.Ref,
        grad_ref: jax.Ref,
        old_refs: Sequence[jax.Ref],
        new_refs: Sequence[jax.Ref],
    ) -> None:
        lead, group, column = place
        columns = pl.ds(column * width, width)
        by = Scalars(*(by_ref[i] for i in range(len(Scalars._fields))))
        old, new = leaf_of(present, old_refs), leaf_of(present, new_refs)
        scales: list[Any] = [
            None if ref is None else widened(ref[lead, group, columns]) for ref in _scales(old)
        ]

        def row(number: jax.Array, part: int = 0) -> tuple[Any, ...]:
            return lead, group * size + number + part * turns, columns

        def bytes_at(number: jax.Array) -> tuple[Any, ...]:
            return lead, group * turns + number, columns

        def codes(ref: jax.Ref, code: Code, number: jax.Array, part: int) -> jax.Array:
            if code.bits == 8:
                return ref[row(number)]
            both = ref[bytes_at(number)].astype(jnp.int32)
            return nibble(both, part, signed=not code.is_root)

        def stepped(number: jax.Array, part: int, *, moments_only: bool) -> Moments:
            here, value, first, second = row(number, part), None, None, None
            if old.first is not None:
                found = codes(old.first, spec.first, number, part)
                first = spec.first.decode(found, scales[0])
            if old.second is not None:
                found = codes(old.second, spec.second, number, part)
                root = spec.second.decode(found, scales[1])
                second = root * root
            if moments_only and not spec.coupled:
                # The first pass does not read the parameter: the moments depend on it only if
                # weight decay is a part of the gradient.
                value = jnp.zeros(width, jnp.float32)
            else:
                value = joined(old.param[here], None if old.low is None else old.low[here])
            return updated(Moments(value, first, second), widened(grad_ref[here]), by, spec)

        def largest(number: jax.Array, found: list[jax.Array]) -> list[jax.Array]:
            for part in range(parts):
                made = stepped(number, part, moments_only=True)
                values = [x for x in (made.first, made.root) if x is not None]
                found = [jnp.maximum(m, jnp.abs(x)) for m, x in zip(found, values, strict=True)]
            return found

        def write(number: jax.Array, made: list[jax.Array]) -> list[jax.Array]:
            # All parts are computed before any is written: the codes of two lie in one byte.
            every = [stepped(number, part, moments_only=False) for part in range(parts)]
            for part, values in enumerate(every):
                write_param(row(number, part), values)
            if every[0].first is not None:
                moments = [values.first for values in every]
                write_codes(new.first, spec.first, number, moments, widened(made[0]), stream=2)
            if every[0].root is not None:
                moments = [values.root for values in every]
                write_codes(new.second, spec.second, number, moments, widened(made[1]), stream=1)
            return made

        def write_codes(
            ref: jax.Ref,
            code: Code,
            number: jax.Array,
            values: list[Any],
            scale: jax.Array,
            *,
            stream: int,
        ) -> None:
            if code.bits == 8:
                ref[row(number)] = code.encode(values[0], scale)
                return
            found = [
                code.encode(value, scale, noise=drawn(number, part, stream)).astype(jnp.int32) & 15
                for part, value in enumerate(values)
            ]
            ref[bytes_at(number)] = (found[0] | (found[1] << 4)).astype(jnp.uint8)

        def drawn(number: jax.Array, part: int, stream: int) -> jax.Array:
            at = (lead * view.shape[1] + group * size + number + part * turns) * view.shape[2]
            place = at + column * width + jax.lax.broadcasted_iota(jnp.int32, (width,), 0)
            return chances(place.astype(jnp.uint32), by.seed.astype(jnp.int32), stream=stream)

        def write_param(here: tuple[Any, ...], values: Moments) -> None:
            # `parted` uses only the dtypes of the old arrays.
            like: list[Any] = [
                None if r is None else jnp.zeros(width, r.dtype) for r in (new.param, new.low)
            ]
            param, low = parted(values.value, like[0], like[1])
            new.param[here] = param
            if low is not None:
                new.low[here] = low

        # A step that is not kept writes nothing, since the leaf is updated in place.
        @pl.when(by.keep != 0)
        def _() -> None:
            refs = [scale for scale in _scales(new) if scale is not None]
            zeros = [jnp.zeros(width, jnp.float32) for _ in refs]
            found = jax.lax.fori_loop(0, turns, largest, zeros) if refs else zeros
            made = [scale_of(m, ref.dtype) for m, ref in zip(found, refs, strict=True)]
            jax.lax.fori_loop(0, turns, write, made)
            for ref, scale in zip(refs, made, strict=True):
                ref[lead, group, columns] = scale

    return block


def _scales(leaf: Leaf) -> tuple[Any, ...]:
    return tuple(leaf[i] for i in SCALES)
