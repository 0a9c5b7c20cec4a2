"""Multiply two factors whose blocks have scales of their own.

A scale that changes along a row cannot be taken out of the row's sum, so that elements cannot be
multiplied by an ordinary product and scaled afterwards. GPUs since NVIDIA's Blackwell have units
that multiply elements of 8 or 4 bits together with the scales of their blocks. XLA reaches them by
an operation of its own, `jax.lax.scaled_dot`. Other GPUs compute it too: their kernels read the
elements and scales from memory, and multiply in 16 bits.

Blocks of 128 elements in 8 bits are large enough to be scaled between two products. On Hopper, a
kernel does so (`_block_product`). On Blackwell such a block is four blocks of 32 with equal scales.

Over several Blackwell GPUs, each of them multiplies its part with the operation of `shards`.

Everywhere else the factors are decoded to the compute dtype and multiplied, which is the same
product: an element has at most 4 significant bits, a scale too, and the compute dtype holds their
product exactly.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import halfstep.kernels._block_product as block_product
from halfstep._autocast.f8 import shards
from halfstep._base import answer_partitioner
from halfstep._policy import Factor
from halfstep.kernels._target import capability_of, is_divided
from halfstep.quant._scaled import Blocks, decoded, scale_of_rows

# `[batch, row, element]` of both factors: rows are multiplied with rows.
_DIMENSIONS = (((2,), (2,)), ((0,), (0,)))
_MICROSCALED, _TWO_LEVEL = 32, 16
# The compute capability of data-center Blackwell begins with this number.
_BLACKWELL = 10


@dataclasses.dataclass(frozen=True)
class Form:
    """How a product is computed, apart from its operands.

    Attributes:
        compute: The dtype of products without units for blocks.
        out: The dtype of the result.
        native: The scope of a product with units for blocks.
        rounded: The scope of a product of decoded factors.
    """

    compute: np.dtype
    out: np.dtype
    native: str
    rounded: str


def has_units(first: Factor | None, second: Factor | None) -> bool:
    """Return whether some hardware multiplies two factors with their scales.

    These are the formats of the OCP's microscaling, whose blocks have 32 elements and scales that
    are powers of two, NVIDIA's 4 bits, whose blocks have 16 elements and scales in e4m3, and
    elements of 8 bits in blocks of 128, as DeepSeek-V3 has them. Both factors have the same blocks.
    """
    if first is None or second is None or first.size != second.size:
        return False
    return _is_known(first) and _is_known(second)


def _is_known(factor: Factor) -> bool:
    if factor.two_level:
        return factor.element == "e2m1" and factor.size == _TWO_LEVEL
    if factor.element == "e2m1" and jax.__version_info__ < (0, 12):
        # XLA's compiler for GPUs fails on 4 bits with scales that are powers of two.
        return False
    return factor.size == _MICROSCALED or (
        factor.size == block_product.BLOCK and factor.element != "e2m1"
    )


def generations(first: Factor, second: Factor) -> tuple[str, ...]:
    """Return the GPUs that multiply two factors with their scales, without decoding them."""
    if not has_units(first, second):
        return ()
    by_kernel = first.size == block_product.BLOCK and jax.__version_info__ >= block_product.JAX
    return ("Hopper", "Blackwell") if by_kernel else ("Blackwell",)


def multiply(
    first: Blocks,
    second: Blocks,
    of_first: Factor,
    of_second: Factor,
    *,
    compute: np.dtype,
    out: np.dtype,
    scopes: tuple[str, str],
) -> jax.Array:
    """Multiply rows with rows: `[batch, row of the first, row of the second]`.

    Args:
        first: The first factor.
        second: The second factor.
        of_first: How the first factor is encoded.
        of_second: How the second factor is encoded.
        compute: The dtype of products without units for blocks.
        out: The dtype of the result.
        scopes: The scopes of a product with units for blocks, and of one without.
    """
    by = functools.partial(product, form=Form(compute, out, *scopes))
    return multiply_arrays(by, first, second, of_first, of_second)


def multiply_arrays(
    by: Callable[..., jax.Array], first: Blocks, second: Blocks, of_first: Factor, of_second: Factor
) -> jax.Array:
    """Multiply by a product that takes the elements and the scales of each factor as arrays.

    Args:
        by: The product, as `product` is without its form.
        first: The first factor.
        second: The second factor.
        of_first: How the first factor is encoded.
        of_second: How the second factor is encoded.
    """
    operands: list[jax.Array] = []
    for array, factor in ((first, of_first), (second, of_second)):
        batch, rows, count, size = array.elements.shape
        operands.append(array.elements.reshape(batch, rows, count * size))
        operands.append(scale_of_rows(array.scale, rows, factor))
    made = by(*operands)
    # A power of two: multiplying by it is exact.
    if of_first.two_level or of_second.two_level:
        made = made * (first.outer * second.outer).astype(made.dtype)
    return made


def product(
    first: jax.Array, of_first: jax.Array, second: jax.Array, of_second: jax.Array, *, form: Form
) -> jax.Array:
    """Multiply rows with rows, with the elements and the scales of each factor as arrays.

    Elements are `[batch, row, element]`, scales `[batch, row, block]`.
    """
    made: jax.Array = _blocks.bind(first, of_first, second, of_second, form=form)
    return made


_blocks = Primitive("halfstep_blocks")


def _decoded(
    first: jax.Array, of_first: jax.Array, second: jax.Array, of_second: jax.Array, *, form: Form
) -> jax.Array:
    left, right = (
        read_rows(elements, scale, form.compute)
        for elements, scale in ((first, of_first), (second, of_second))
    )
    with jax.named_scope(form.rounded):
        return jax.lax.dot_general(left, right, _DIMENSIONS, preferred_element_type=form.out)


def read_rows(elements: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """Decode rows, whose elements and scales are arrays."""
    # If there are no rows, a reshape cannot tell the size of a block.
    blocks = elements.reshape(*scale.shape, _size(elements, scale))
    return decoded(blocks, scale, dtype).reshape(elements.shape)


def _scaled(
    first: jax.Array, of_first: jax.Array, second: jax.Array, of_second: jax.Array, *, form: Form
) -> jax.Array:
    if _size(first, of_first) == block_product.BLOCK:
        times = block_product.BLOCK // _MICROSCALED
        of_first, of_second = (jnp.repeat(scale, times, axis=-1) for scale in (of_first, of_second))
    with jax.named_scope(form.native):
        made = jax.lax.scaled_dot(
            first,
            second,
            lhs_scale=of_first,
            rhs_scale=of_second,
            dimension_numbers=_DIMENSIONS,
            preferred_element_type=_native_out(form),
        )
    return made.astype(form.out)


def _by_kernel(
    first: jax.Array, of_first: jax.Array, second: jax.Array, of_second: jax.Array, *, form: Form
) -> jax.Array:
    with jax.named_scope(form.native):
        return block_product.product(first, of_first, second, of_second, out=form.out)


def _size(elements: jax.Array | ShapedArray, scale: jax.Array | ShapedArray) -> int:
    """Return how many elements share a scale."""
    return elements.shape[-1] // scale.shape[-1]


def _native_out(form: Form) -> np.dtype:
    # The operation accumulates in float32, and returns this or bfloat16.
    return form.out if form.out == jnp.bfloat16 else np.dtype(np.float32)


def _abstract(
    first: ShapedArray, _: ShapedArray, second: ShapedArray, __: ShapedArray, *, form: Form
) -> ShapedArray:
    factors = [aval.update(dtype=form.compute) for aval in (first, second)]
    made, _ = jax.lax.dot_general_p.abstract_eval(
        *factors,
        dimension_numbers=_DIMENSIONS,
        precision=None,
        preferred_element_type=form.out,
        out_sharding=None,
    )
    return made


def _batch(values: Any, axes: Any, *, form: Form) -> Any:
    size = next(v.shape[a] for v, a in zip(values, axes, strict=True) if a is not None)
    moved = [batching.bdim_at_front(v, a, size) for v, a in zip(values, axes, strict=True)]
    # The mapped dimension becomes a part of the batch.
    merged = [value.reshape(-1, *value.shape[2:]) for value in moved]
    made = _blocks.bind(*merged, form=form)
    return made.reshape(size, -1, *made.shape[1:]), 0


_lower_decoded = mlir.lower_fun(_decoded, multiple_results=False)
_lower_scaled = mlir.lower_fun(_scaled, multiple_results=False)
_lower_kernel = mlir.lower_fun(_by_kernel, multiple_results=False)


def _lower_on_gpu(ctx: mlir.LoweringRuleContext, *values: Any, form: Form) -> Any:
    # XLA's partitioner cannot divide a scaled operation over several devices.
    devices = getattr(ctx.module_context.axis_context, "num_devices", None)
    avals: Any = ctx.avals_in
    if _size(*avals[:2]) == block_product.BLOCK:
        lower = _lower_large(ctx, is_alone=devices == 1)
    else:
        lower = _lower_scaled if devices == 1 else _lower_on_gpus(ctx)
    return lower(ctx, *values, form=form)


def _lower_large(ctx: mlir.LoweringRuleContext, *, is_alone: bool) -> Any:
    """Return how a product of blocks of 128 is lowered for GPUs."""
    avals: Any = ctx.avals_in
    capability = capability_of(ctx)
    if capability is not None and capability[0] >= _BLACKWELL and is_alone:
        return _lower_scaled
    # XLA cannot divide a kernel. Inside `shard_map` there is nothing to divide.
    if block_product.refusal(avals, capability) is None and not is_divided(ctx):
        return _lower_kernel
    return _lower_decoded


def _lower_on_gpus(ctx: mlir.LoweringRuleContext) -> Any:
    """Return how a product is lowered for several GPUs."""
    avals: Any = ctx.avals_in
    capability = capability_of(ctx)
    if capability is None or capability[0] != _BLACKWELL or not shards.is_known(avals):
        return _lower_decoded
    if not is_divided(ctx):
        return _lower_alone
    # GSPMD, JAX's partitioner of old, does not ask.
    is_asked = getattr(jax.config, "jax_use_shardy_partitioner", True)
    sizes = shards.sizes_of(ctx.module_context) if is_asked else ()
    answers = [_answer(sizes, out) for out in shards.RESULTS] if sizes else [None]
    if None in answers:
        return _lower_decoded
    # An exported program cannot keep anything of this process: preflight's worker has answers.
    if not ctx.module_context.lowering_parameters.for_export:
        for answer in answers:
            ctx.module_context.add_keepalive(answer)
    return _lower_divided


def _answer(sizes: Sequence[int], out: str) -> object:
    partition = functools.partial(shards.partition, out)
    return answer_partitioner(shards.key(sizes, out), shards.mesh_of(sizes), partition, 4)


def _multiplied(primitive: Primitive) -> Callable[..., jax.Array]:
    """Return a product by an operation with scales."""

    def multiplied(*operands: jax.Array, form: Form) -> jax.Array:
        with jax.named_scope(form.native):
            return primitive.bind(*operands, out=_native_out(form)).astype(form.out)

    return multiplied


# The product of all devices, which XLA divides. Each device's own is `shards.product`.
_divided = Primitive("halfstep_divided_blocks")
_divided.def_abstract_eval(shards.abstract)
mlir.register_lowering(_divided, shards.lower_divided, platform="cuda")
_lower_divided = mlir.lower_fun(_multiplied(_divided), multiple_results=False)
_lower_alone = mlir.lower_fun(_multiplied(shards.product), multiple_results=False)
_blocks.def_impl(_decoded)
_blocks.def_abstract_eval(_abstract)
batching.primitive_batchers[_blocks] = _batch
mlir.register_lowering(_blocks, _lower_decoded)
mlir.register_lowering(_blocks, _lower_on_gpu, platform="cuda")
