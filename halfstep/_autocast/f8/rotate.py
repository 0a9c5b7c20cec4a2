"""Rotate the rows of both factors of a product by a random orthogonal matrix.

A rotation spreads an outlier over its block. Both factors are rotated alike, which does not change
their product: the matrix, a Hadamard matrix with random signs, is its own inverse but for the side
on which the signs are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, Float32, Key

from halfstep.kernels._target import is_divided
from halfstep.quant._scaled import widened


def rotated(
    value: Float[Array, "b r n"], size: int, *, key: Key[Array, ""], back: bool = False
) -> Float[Array, "b r n"]:
    """Multiply full blocks of rows by a Hadamard matrix with random signs, or undo this.

    Args:
        value: A batch of rows.
        size: The size of a block.
        key: The source of the signs.
        back: Whether to undo a rotation with the same key.
    """
    batch, rows, length = value.shape
    whole = length // size * size
    # The rows are columns of the array that they come from, since a gradient of weights sums over
    # tokens. With the rows last again, XLA reads this array as it is, and makes no transposed copy.
    blocks = jnp.swapaxes(value[..., :whole], 1, 2).reshape(batch, whole // size, size, rows)
    signs = jax.random.rademacher(key, (size,), value.dtype)
    made = _rotation.bind(blocks, signs, back=back).astype(value.dtype)
    made = jnp.swapaxes(made.reshape(batch, whole, rows), 1, 2)
    return jnp.concatenate([made, value[..., whole:]], axis=-1)


def by_sums(
    blocks: Float[Array, "b k e r"], signs: Float[Array, " e"], *, back: bool
) -> Float32[Array, "b k e r"]:
    """Multiply columns by signs and by the matrix, by a sum for each element.

    XLA makes one kernel of this sum. A product of matrices would have 16 columns, for which XLA's
    compiler for GPUs has no tiles. Products with signs are exact in every dtype.
    """
    size = blocks.shape[2]
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signed = jnp.asarray(matrix, blocks.dtype) * (signs[:, None] if back else signs[None])
    terms = widened(blocks[:, :, None] * signed[None, None, :, :, None])
    return jnp.sum(terms * np.float32(size**-0.5), axis=3)


def by_pairs(
    blocks: Float[Array, "b k e r"], signs: Float[Array, " e"], *, back: bool
) -> Float32[Array, "b k e r"]:
    """Do the same by sums and differences of pairs, level by level: a quarter of the additions.

    On GPUs each level is a kernel of its own, which reads and writes float32.
    """
    (batch, count, size, rows), half = blocks.shape, 1
    by = signs.astype(jnp.float32)[None, None, :, None] * np.float32(size**-0.5)
    made = blocks.astype(jnp.float32)
    made = made if back else made * by
    while half < size:
        pairs = made.reshape(batch, count, size // (2 * half), 2, half, rows)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        made = jnp.stack([first + second, first - second], axis=3).reshape(blocks.shape)
        half *= 2
    return made * by if back else made


def _abstract(blocks: ShapedArray, _: ShapedArray, *, back: bool) -> ShapedArray:
    return blocks.update(dtype=np.dtype(np.float32))


def _batch(values: Any, axes: Any, *, back: bool) -> Any:
    return jax.vmap(functools.partial(by_pairs, back=back), in_axes=axes)(*values), 0


def _lower_on_gpu(ctx: mlir.LoweringRuleContext, *values: Any, back: bool) -> Any:
    # Shardy decides late how sums are divided: by then it has decided to gather the factors of a
    # gradient, which are divided along the tokens.
    return (_lower_pairs if is_divided(ctx) else _lower_sums)(ctx, *values, back=back)


_rotation = Primitive("halfstep_rotation")
_rotation.def_impl(by_pairs)
_rotation.def_abstract_eval(_abstract)
batching.primitive_batchers[_rotation] = _batch
_lower_pairs = mlir.lower_fun(by_pairs, multiple_results=False)
_lower_sums = mlir.lower_fun(by_sums, multiple_results=False)
mlir.register_lowering(_rotation, _lower_pairs)
mlir.register_lowering(_rotation, _lower_on_gpu, platform="cuda")
