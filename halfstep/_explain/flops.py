"""Count the FLOPs of an operation from the shapes of its operands.

A multiply-add counts as two FLOPs, also for complex numbers. A convolution counts all positions of
its window, including those on padding. Other arithmetic counts as one FLOP per element.
"""

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np

from halfstep._autocast import CONTRACTIONS, TABLE, Rule
from halfstep._base import ClosedJaxpr, Shaped
from halfstep._explain.entries import name_of
from halfstep._program import equations, functions_in, structure_of

_Params: TypeAlias = Mapping[str, Any]
"""The parameters of a primitive."""

# Calls whose products do not appear in the traced program.
_UNSEEN = frozenset(
    {
        *("ffi_call", "tpu_custom_call", "mosaic_gpu_p", "cudnn_fusion", "rnn_fwd", "rnn_bwd"),
        *("pure_callback", "io_callback", "buffer_callback", "call_exported", "noinline"),
        *("scaled_dot", "scaled_matmul_wrapper", "dot_product_attention_fwd_wrapper"),
        *("dot_product_attention_fp8_fwd_wrapper", "bcoo_spdot_general"),
    }
)
# Products of tensor cores that a kernel asks for by name: what they return shows their shapes.
_BY_NAME = frozenset(
    {
        *("wgmma", "tcgen05_mma", "mma", "matmul_acc_lhs", "matmul_push_rhs", "matmul_pop"),
        *("matmul_lhs_fifo", "matmul_pop_fifo", "elementwise_inline_asm", "inline_mgpu"),
    }
)

# Operations with a rule of arithmetic that only select or move values.
_MOVEMENT = frozenset({"select_n", "concatenate", "pad", "dynamic_update_slice", "scatter"})


def operation_flops(name: str, params: _Params, ins: Sequence[Any], outs: Sequence[Any]) -> int:
    """Return the FLOPs of one run of an operation; 0 if it only moves values.

    Args:
        name: The primitive's name.
        params: The parameters of the primitive.
        ins: Its operands' types: anything with a `shape`.
        outs: Its results' types.
    """
    if name in CONTRACTIONS:
        return _COUNTERS[name](params, ins, outs)
    if TABLE.get(name) not in (Rule.FLOAT32, Rule.WIDEST) or name in _MOVEMENT:
        return 0
    # A sum reads more than it writes, and a broadcast addition the other way round.
    return max(elements(aval) for aval in (*ins, *outs))


def flops_in(functions: Iterable[ClosedJaxpr]) -> dict[str, int]:
    """Return the FLOPs of all contractions in traced functions, by the dtypes of their factors."""
    total: collections.Counter[str] = collections.Counter()
    for function in functions:
        for equation in function.jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            ins: list[Any] = [var.aval for var in equation.invars]
            outs: list[Any] = [var.aval for var in equation.outvars]
            if name in CONTRACTIONS:
                factors = dict.fromkeys(name_of(aval.dtype) for aval in ins[:2])
                total[" x ".join(factors)] += operation_flops(name, params, ins, outs)
            else:
                total.update(inside_flops(name, params, ins, outs))
    return dict(total)


def inside_flops(
    name: str, params: _Params, ins: Sequence[Any], outs: Sequence[Any]
) -> Mapping[str, int]:
    """Return the FLOPs of the products inside an operation, by the dtypes of their factors.

    The operation itself is not a contraction. The products are those of sparse matrices, and those
    in the functions that an operation runs as they are written. A kernel's functions run on blocks,
    as often as its grid says.
    """
    if name in _SPARSE:
        dtype = next(aval.dtype for aval in ins if not jnp.issubdtype(aval.dtype, np.integer))
        return {name_of(dtype): _SPARSE[name](params, ins, outs)}
    structure = structure_of(name, params)
    if structure is None:
        return flops_in(functions_in(name, params))
    total: collections.Counter[str] = collections.Counter()
    for inner in structure.inner():
        found = flops_in((inner.function,))
        total.update({dtype: count * inner.times for dtype, count in found.items()})
    return dict(total)


def is_unseen(name: str, params: _Params) -> bool:
    """Return whether an operation multiplies matrices that the traced program does not show."""
    return name in _UNSEEN or any(
        equation.primitive.name in (*_UNSEEN, *_BY_NAME)
        for function in functions_in(name, params)
        for equation in equations(function.jaxpr)
    )


def elements(aval: object) -> int:
    """Return how many elements a value has."""
    return math.prod(getattr(aval, "shape", ()))


def _dot(params: _Params, ins: Sequence[Shaped], outs: Sequence[Shaped]) -> int:
    (contracting, _), _ = params["dimension_numbers"]
    return 2 * elements(outs[0]) * _sizes(ins[0], contracting)


def _ragged_dot(params: _Params, ins: Sequence[Shaped], outs: Sequence[Shaped]) -> int:
    """Count with full groups, which gives the maximum: each row meets one group's matrix."""
    numbers = params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return 2 * elements(outs[0]) * ins[0].shape[-1]
    (contracting, _), _ = numbers.dot_dimension_numbers
    count = 2 * elements(outs[0]) * _sizes(ins[0], contracting)
    # If the groups split the contracted dimension, the result has one slice for each.
    split = set(numbers.lhs_ragged_dimensions) <= set(contracting)
    return count // outs[0].shape[0] if split else count


def _convolution(params: _Params, ins: Sequence[Shaped], outs: Sequence[Shaped]) -> int:
    out_features = ins[1].shape[params["dimension_numbers"].rhs_spec[0]]
    return 2 * elements(outs[0]) * elements(ins[1]) // max(1, out_features)


def _sparse_by_dense(params: _Params, ins: Sequence[Shaped], outs: Sequence[Shaped]) -> int:
    """Count, for each stored element, the dense factor's elements at its own place."""
    (_, contracted), (_, batch) = params["dimension_numbers"]
    dense = ins[-1]
    own = set(range(len(dense.shape))) - {*contracted, *batch}
    return 2 * elements(ins[0]) * _sizes(dense, sorted(own))


def _sampled(params: _Params, ins: Sequence[Shaped], outs: Sequence[Shaped]) -> int:
    (contracting, _), _ = params["dimension_numbers"]
    return 2 * elements(outs[0]) * _sizes(ins[0], contracting)


def _sparse_by_vector(params: _Params, ins: Sequence[Shaped], outs: Sequence[Shaped]) -> int:
    return 2 * elements(ins[0])


def _sparse_by_matrix(params: _Params, ins: Sequence[Shaped], outs: Sequence[Shaped]) -> int:
    return 2 * elements(ins[0]) * ins[-1].shape[1]


def _sizes(aval: Shaped, dimensions: Sequence[int]) -> int:
    return math.prod(aval.shape[dimension] for dimension in dimensions)


_COUNTERS = MappingProxyType(
    {
        "dot_general": _dot,
        "conv_general_dilated": _convolution,
        "ragged_dot": _ragged_dot,
        "ragged_dot_general": _ragged_dot,
    }
)
_SPARSE = MappingProxyType(
    {
        "bcoo_dot_general": _sparse_by_dense,
        "bcsr_dot_general": _sparse_by_dense,
        "bcoo_dot_general_sampled": _sampled,
        **dict.fromkeys(("coo_matvec", "csr_matvec"), _sparse_by_vector),
        **dict.fromkeys(("coo_matmat", "csr_matmat"), _sparse_by_matrix),
    }
)
