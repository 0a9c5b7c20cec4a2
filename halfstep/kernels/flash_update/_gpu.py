"""The update as one kernel for NVIDIA's GPUs, in Pallas by way of Triton.

Every leaf has a kernel: groups along any axis, groups that are not full, parameters of 16 and 32
bits with or without the bits that they lack, gradients of 16 and 32 bits. What is not (empty
leaves, moments in other codes than int8 and root8) is left to XLA.

It is Triton, which reaches every card since Ampere; Mosaic is for Hopper and later only.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from halfstep.kernels.flash_update._block import (
    SCALES,
    View,
    refusal as refusal,
    reshaped,
    update_block,
    view_of,
)
from halfstep.kernels.flash_update._spec import Leaf, Scalars, Spec, leaf_of

_ELEMENTS = 4096
"""In a block: of 128 threads, each holds 32 of them."""


def update(leaf: Leaf, grad: Any, by: Any, spec: Spec, *, interpret: bool = False) -> Leaf:
    """One step of a leaf.

    Args:
        leaf: The parameter and its state. All of it is overwritten where it lies.
        grad: The gradient, in its own dtype.
        by: The hyperparameters, in one array.
        spec: Which optimizer it is.
        interpret: Whether to run it as JAX, on any machine.
    """
    # Here, since Pallas takes a second to import and most programs need none of it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    def load(ref: Any, mask: Any) -> Any:
        # What is outside is zero, which no maximum of a group sees.
        return plgpu.load(ref, mask=mask, other=None if mask is None else 0)

    view = view_of(leaf.param.shape, spec.groups)
    rows, cols = _block(view)
    scales = view.scale_block((rows, cols))
    down, across = math.ceil(view.shape[1] / rows), math.ceil(view.shape[2] / cols)
    present = leaf.present

    def at(number: Any) -> tuple[Any, Any, Any]:
        # One number for a block, and three made of it here: a grid's first size may be any.
        div, rem = jax.lax.div, jax.lax.rem
        line = div(number, jnp.int32(across))
        return (
            div(line, jnp.int32(down)),
            rem(line, jnp.int32(down)),
            rem(number, jnp.int32(across)),
        )

    def kernel(by_ref: Any, grad_ref: Any, *refs: Any) -> None:
        start = at(pl.program_id(0))
        whole = _mask(view.shape, (rows, cols), start)
        of_scales = _mask(view.scale_shape, scales, start)
        masks = [of_scales if i in SCALES else whole for i in present]
        block = map(load, refs[: len(present)], masks)
        scalars = Scalars(*(by_ref[i] for i in range(len(Scalars._fields))))
        new = update_block(
            leaf_of(present, block),
            load(grad_ref, whole),
            scalars._replace(seed=scalars.seed.astype(jnp.int32)),
            spec,
            view.groups,
            at=view.position((rows, cols), (start[0], start[1] * rows, start[2] * cols)),
            # Triton has no `jnp.round`. Ties go up here, and to even elsewhere.
            nearest=lambda position: jnp.floor(position + 0.5),
        )
        for i, ref, mask in zip(present, refs[len(present) :], masks, strict=True):
            plgpu.store(ref, new[i], mask=mask)

    arrays = view.arrays(leaf)
    of_block = pl.BlockSpec((None, rows, cols), at)
    of_scale = pl.BlockSpec((None, *scales), at)
    specs = [of_scale if i in SCALES else of_block for i in present]
    made = pl.pallas_call(
        kernel,
        [jax.typeof(array) for array in arrays],
        grid=(view.shape[0] * down * across,),
        in_specs=[pl.BlockSpec(by.shape, lambda _: (0,)), of_block, *specs],
        out_specs=specs,
        input_output_aliases={2 + i: i for i in range(len(present))},
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="flash_update",
    )(by, grad.reshape(view.shape), *arrays)
    return reshaped(made, leaf)


def _block(view: View) -> tuple[int, int]:
    """The rows and columns of a block: powers of two, which is what Triton has."""
    _, rows, cols = view.shape
    size = view.groups.size
    if view.groups.axis == -2:
        return size, min(_ELEMENTS // size, _power(cols))
    wide = min(max(size, _power(cols)), 1024)
    return min(_ELEMENTS // wide, _power(rows)), wide


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _mask(shape: tuple[int, ...], block: tuple[int, int], start: tuple[Any, Any, Any]) -> Any:
    """Where a block lies within the leaf; `None` if all blocks do."""
    masks = []
    for axis, (size, length) in enumerate(zip(shape[1:], block, strict=True)):
        if size % length:
            index = jax.lax.broadcasted_iota(jnp.int32, block, axis)
            masks.append(start[axis + 1] * length + index < size)
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] & masks[1]
