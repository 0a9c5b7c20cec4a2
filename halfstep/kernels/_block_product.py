"""Multiply factors in blocks of 128 on Hopper GPUs, in Pallas by way of Mosaic GPU.

A Hopper GPU multiplies elements of 8 bits but cannot scale blocks. So the kernel does what
DeepSeek-V3's does: the tensor cores multiply one block of 128 elements at a time (`wgmma` on e4m3
or e5m2), and the other units scale the result and add it to a sum in float32.

Not Pallas' Triton backend: it compiles this product for an H100, but its products of 8 bits ask for
exact sums in float32, and Triton then converts the elements to float16 before they are multiplied.
Not one product of XLA's for each block either: each would write and read the whole result.

A block of threads computes a tile of 128 x 128. Two warpgroups multiply 64 rows each, and a third
copies the next blocks into shared memory. The hardware's copies give zeros beyond the last row of a
factor, and write nothing beyond the result, so that rows need not be multiples of 128. They are
padded to multiples of 8, and columns to multiples of 16, which the copies need.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from halfstep.kernels._target import Capability

BLOCK = 128
"""The elements that share a scale, and the rows and columns of a tile of the result."""
NAME = "halfstep_block_product"
"""The kernel's name in a compiled program."""
JAX = (0, 12)
"""The oldest JAX that compiles the kernel."""
_HOPPER = 9
_WARPGROUPS = 2
_ROWS = BLOCK // _WARPGROUPS
# Copies move pieces of 8 rows and 32, 64 or 128 bytes. Arrays must consist of whole pieces.
_PIECE_ROWS, _PIECE_COLUMNS = 8, 16
_PIECE_BYTES = (128, 64, 32)
# Blocks in shared memory at once. Four of both factors take 128 KiB of the 227 that there are, and
# the tile of the result up to 64.
_STAGES = 4
# Registers of the threads that only copy, as in JAX's own kernels for Hopper.
_MEMORY_REGISTERS = 40
# Tiles next to each other share rows and columns in the cache.
_SNAKE = 8


def refusal(operands: Sequence[ShapedArray], capability: Capability | None) -> str | None:
    """Return why the kernel does not multiply two factors, or `None` if it does.

    Args:
        operands: The elements and scales of the first factor, then of the second.
        capability: The compute capability of the GPU; `None` if it is not known.
    """
    if jax.__version_info__ < JAX:
        return f"takes JAX 0.12 or later; got {jax.__version__}"
    if capability is None or capability[0] != _HOPPER:
        number = ".".join(map(str, capability)) if capability else None
        return f"takes GPUs of compute capability 9 (Hopper); got {number}"
    first, of_first, second, of_second = operands
    for elements, scale in ((first, of_first), (second, of_second)):
        if elements.dtype not in (jnp.float8_e4m3fn, jnp.float8_e5m2):
            return f"takes elements of float8_e4m3fn or float8_e5m2; got {elements.dtype}"
        # A size may be a symbol of `jax.export`, and rows may be empty.
        if not all(isinstance(size, int) and size for size in elements.shape):
            return f"takes known sizes other than zero; got {elements.shape}"
        if elements.shape[-1] != BLOCK * scale.shape[-1]:
            return f"takes blocks of {BLOCK}; got {elements.shape} with scales {scale.shape}"
    return None


def product(
    first: jax.Array,
    of_first: jax.Array,
    second: jax.Array,
    of_second: jax.Array,
    *,
    out: np.dtype,
    interpret: Any = None,
) -> jax.Array:
    """Multiply rows with rows: `[batch, row of the first, row of the second]`.

    Args:
        first: The elements of the first factor, `[batch, row, element]`.
        of_first: Its scales, `[batch, row, block]`.
        second: The elements of the second factor.
        of_second: Its scales.
        out: The dtype of the result; sums are in float32.
        interpret: Pallas' parameters to run the kernel as JAX, on any machine.
    """
    rows, columns = first.shape[1], second.shape[1]
    first = jnp.pad(first, ((0, 0), (0, -rows % _PIECE_ROWS), (0, 0)))
    second = jnp.pad(second, ((0, 0), (0, -columns % _PIECE_COLUMNS), (0, 0)))
    # The kernel is traced and lowered once for all products of the same shape.
    made = _kernel(first, _by_block(of_first), second, _by_block(of_second), out, interpret)
    return made[:, :rows, :columns]


def _by_block(scale: jax.Array) -> jax.Array:
    """Return scales as `[batch, block, row]`, of full tiles, so that a tile's are contiguous."""
    padded = jnp.pad(scale.astype(jnp.float32), ((0, 0), (0, -scale.shape[1] % BLOCK), (0, 0)))
    return jnp.swapaxes(padded, 1, 2)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _kernel(
    first: jax.Array,
    of_first: jax.Array,
    second: jax.Array,
    of_second: jax.Array,
    out: np.dtype,
    interpret: Any,
) -> jax.Array:
    # Imported here: Pallas takes a second to import, and most programs do not need it.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu

    # Pyright takes some of its classes for abstract ones.
    plgpu: Any = mosaic_gpu
    (batch, rows, length), columns = first.shape, second.shape[1]
    tiles = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)

    def in_pieces(dtype: np.dtype, columns: int) -> tuple[Any, ...]:
        # How the tensor cores and the copies expect a tile in shared memory.
        size = next(size for size in _PIECE_BYTES if columns * dtype.itemsize % size == 0)
        tiling = plgpu.TilingTransform((_PIECE_ROWS, size // dtype.itemsize))
        return tiling, plgpu.SwizzleTransform(size)

    elements = in_pieces(first.dtype, length)

    def body(*refs: Any, tile: Any) -> None:
        *factors, result = refs
        group = jax.lax.axis_index("warpgroup")
        place = jax.lax.axis_index("tile")
        each = jnp.int32(math.prod(tiles))
        of_batch = jax.lax.div(place, each)
        row, column = plgpu.planar_snake(jax.lax.rem(place, each), tiles, 0, _SNAKE)
        mine = pl.ds(group * _ROWS, _ROWS)

        def computing(run: Any) -> None:
            zeros = jnp.zeros((_ROWS, BLOCK), jnp.float32)
            made = run(plgpu.layout_cast(zeros, plgpu.Layout.WGMMA))
            tile[mine] = made.astype(out)
            plgpu.commit_smem()
            into = pl.ds(row * BLOCK + group * _ROWS, _ROWS), pl.ds(column * BLOCK, BLOCK)
            plgpu.copy_smem_to_gmem(tile.at[mine], result.at[of_batch, *into])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def block(_: Any, left: Any, of_left: Any, right: Any, of_right: Any, total: Any) -> Any:
            def multiplied(sums: Any) -> Any:
                plgpu.wgmma(sums, left.at[mine], right.T)
                plgpu.wgmma_wait(0)
                return sums[...]

            made = pl.run_scoped(multiplied, plgpu.WGMMAAccumulatorRef((_ROWS, BLOCK), jnp.float32))
            by_row = plgpu.load(of_left.at[0, mine], layout=plgpu.Layout.WGMMA.reduce(1))
            by_column = plgpu.load(of_right.at[0], layout=plgpu.Layout.WGMMA.reduce(0))
            # Scales are read like other memory, and the next ones are written by a copy: it must
            # see that they have been read.
            plgpu.commit_smem()
            scale = [
                jax.lax.broadcast_in_dim(by, made.shape, (axis,))
                for axis, by in enumerate((by_row, by_column))
            ]
            return total + made * (scale[0] * scale[1])

        by_elements = plgpu.BlockSpec((BLOCK, BLOCK), lambda k: (0, k), transforms=elements)
        by_scales = plgpu.BlockSpec((1, BLOCK), lambda k: (k, 0))
        pipeline = plgpu.emit_pipeline_warp_specialized(
            block,
            grid=(length // BLOCK,),
            in_specs=[by_elements, by_scales, by_elements, by_scales],
            memory_registers=_MEMORY_REGISTERS,
            max_concurrent_steps=_STAGES,
            wg_axis="warpgroup",
            num_compute_wgs=_WARPGROUPS,
            compute_context=computing,
        )
        left, of_left, right, of_right = factors
        here, there = (pl.ds(at * BLOCK, BLOCK) for at in (row, column))
        pipeline(
            left.at[of_batch, here],
            of_left.at[of_batch, :, here],
            right.at[of_batch, there],
            of_right.at[of_batch, :, there],
        )

    made = jax.ShapeDtypeStruct((batch, rows, columns), out)
    flops = 2 * batch * rows * columns * length
    return plgpu.kernel(
        body,
        out_type=made,
        scratch_types={"tile": plgpu.SMEM((BLOCK, BLOCK), out, transforms=in_pieces(out, columns))},
        grid=(batch * math.prod(tiles),),
        grid_names=("tile",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=NAME,
        cost_estimate=pl.CostEstimate(
            flops=flops,
            transcendentals=0,
            bytes_accessed=sum(
                math.prod(array.shape) * array.dtype.itemsize
                for array in (first, of_first, second, of_second, made)
            ),
        ),
        interpret=interpret,
    )(first, of_first, second, of_second)
