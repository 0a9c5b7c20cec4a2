"""Compute the update in one kernel for TPUs, in Pallas by way of Mosaic.

| leaf | computed by |
|---|---|
| two or more axes, groups along the last but one, full or not | this kernel |
| the same with master_bits of 24, 32 or none, bfloat16 or float32 parameters | this kernel |
| bfloat16 or float32 gradients, moments of 8 or 4 bits | this kernel |
| float16 gradients or parameters, which Mosaic cannot load | XLA |
| groups along the last axis: Mosaic cannot divide lanes into 32 and 32 | XLA |
| groups along an axis before the last two: merging the axes after it would copy the leaf | XLA |
| one axis | XLA |
| divided among devices by the compiler, which does not divide kernels for TPUs | XLA |
| divided by `shard_map`, by a mesh of explicit axes, or by `sharding=` | this kernel |
"""

import math

import jax
import jax.numpy as jnp

from halfstep.kernels.flash_update._block import (
    SCALES,
    View,
    refusal as common_refusal,
    reshaped,
    update_block,
)
from halfstep.kernels.flash_update._rule import HasType, Leaf, Scalars, Spec, leaf_of

# A block has the rows of 8 full groups, since scales are loaded in eights, and enough columns to
# keep copies long.
_ROWS = 256
_COLS = 512
# The columns of a block that are computed at a time: as wide as a vector.
_WIDTH = 128


def refusal(leaf: Leaf, grad: HasType, spec: Spec) -> str | None:
    """Return why the kernel does not take a leaf, or `None` if it does."""
    shape = list(leaf.param.shape)
    if len(shape) < 2 or spec.groups.axis != -2:
        return f"takes groups along the last axis but one; got {spec.groups} of shape {shape}"
    if jnp.float16 in (leaf.param.dtype, grad.dtype):
        return "takes no float16, which Mosaic cannot load"
    return common_refusal(leaf, grad, spec)


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
    # Imported here: Pallas takes a second to import, and most programs do not need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    shape = leaf.param.shape
    view = View((math.prod(shape[:-2]), *shape[-2:]), spec.groups)
    rows, cols = _block(view)
    scales = view.scale_block((rows, cols))
    present = leaf.present
    width = _WIDTH if cols % _WIDTH == 0 else cols

    def kernel(by_ref: jax.Ref, grad_ref: jax.Ref, *refs: jax.Ref) -> None:
        scalars = Scalars(*(by_ref[i] for i in range(len(Scalars._fields))))
        scalars = scalars._replace(seed=scalars.seed.astype(jnp.int32))
        lead, row, col = pl.program_id(0), pl.program_id(1) * rows, pl.program_id(2) * cols
        inside = None
        if view.is_ragged:
            index = jax.lax.broadcasted_iota(jnp.int32, (rows, width), 0)
            inside = row + index < view.shape[1]

        def part(number: jax.Array, _: None) -> None:
            first = pl.multiple_of(number * width, width)
            here = (slice(None), pl.ds(first, width))
            block = [
                ref[here] if i in (*SCALES, *spec.packed) else _inside(ref[here], inside)
                for i, ref in zip(present, refs[: len(present)], strict=True)
            ]
            new = update_block(
                leaf_of(present, block),
                _inside(grad_ref[here], inside),
                scalars,
                spec,
                view.groups,
                at=view.position((rows, width), (lead, row, col + first)),
            )
            for i, ref in zip(present, refs[len(present) :], strict=True):
                ref[here] = new[i]

        # A loop computes the block in parts: Mosaic unrolls a block into instructions for each
        # vector, and a program of half a megabyte takes memory too.
        jax.lax.fori_loop(0, cols // width, part, None)

    arrays = view.arrays(leaf, spec)
    of_block = pl.BlockSpec((None, rows, cols), lambda *at: at)
    of_scale = pl.BlockSpec((None, *scales), lambda *at: at)
    of_packed = pl.BlockSpec((None, rows // 2, cols), lambda *at: at)
    shaped = dict.fromkeys(SCALES, of_scale) | dict.fromkeys(spec.packed, of_packed)
    specs = [shaped.get(i, of_block) for i in present]
    made = pl.pallas_call(
        kernel,
        [jax.typeof(array) for array in arrays],
        grid=(view.shape[0], math.ceil(view.shape[1] / rows), math.ceil(view.shape[2] / cols)),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), of_block, *specs],
        out_specs=specs,
        # The update is in place: the outputs are the inputs after the scalars and the gradient.
        input_output_aliases={2 + i: i for i in range(len(present))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
        name="flash_update",
    )(by, grad.reshape(view.shape), *arrays)
    return reshaped(made, leaf)


def _block(view: View) -> tuple[int, int]:
    """Return the rows and columns of a block: full tiles, or all of a smaller leaf."""
    _, rows, cols = view.shape
    cols = min(cols, _COLS)
    # A small number of rows is one block, for which Pallas needs no multiple of a tile.
    if rows <= _ROWS and rows % view.groups.size == 0:
        return rows, cols
    return _ROWS, cols


def _inside(value: jax.Array, inside: jax.Array | None) -> jax.Array:
    """Replace values beyond the last row by zeros, so that they change no maximum of a group."""
    return value if inside is None else jnp.where(inside, value, jnp.zeros_like(value))
