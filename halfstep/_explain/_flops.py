"""What an operation computes, from the shapes of its operands.

A multiply-add counts two FLOPs, also of complex numbers. A convolution counts all positions of its
window, those on padding included. What is no contraction counts one FLOP an element.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from halfstep._autocast._table import CONTRACTIONS, TABLE, Rule
from halfstep._explain._entry import name_of
from halfstep._program.control_flow import structure_of

KERNELS = frozenset({"pallas_call", "ffi_call", "core_map"})
"""What runs on blocks of its operands, as often as its grid says."""

# Arithmetic by their rule, and yet nothing but choices and movement.
_MOVEMENT = frozenset({"select_n", "concatenate", "pad", "dynamic_update_slice", "scatter"})


def flops(name: str, params: Any, ins: Sequence[Any], outs: Sequence[Any]) -> int:
    """How many FLOPs one run of an operation takes; 0 for what only moves values.

    Args:
        name: The primitive's name.
        params: What it is bound with.
        ins: Its operands' types: what has a `shape`.
        outs: Its results' types.
    """
    if name in CONTRACTIONS:
        return _COUNTERS[name](params, ins, outs)
    if TABLE.get(name) not in (Rule.FLOAT32, Rule.WIDEST) or name in _MOVEMENT:
        return 0
    return max(elements(aval) for aval in (*ins, *outs))


def flops_in(functions: Iterable[Any]) -> dict[str, int]:
    """FLOPs of all contractions in traced functions, by the dtypes of their factors."""
    total: dict[str, int] = {}

    def add(found: Mapping[str, int], times: int = 1) -> None:
        for name, count in found.items():
            total[name] = total.get(name, 0) + count * times

    for function in functions:
        for equation in function.jaxpr.eqns:
            name, params = equation.primitive.name, equation.params
            structure = structure_of(name, params)
            if name in CONTRACTIONS:
                ins, outs = (
                    [var.aval for var in found] for found in (equation.invars, equation.outvars)
                )
                factors = dict.fromkeys(name_of(aval.dtype) for aval in ins[:2])
                add({" x ".join(factors): flops(name, params, ins, outs)})
            elif structure is not None and name not in KERNELS:
                for inner in structure.inner():
                    add(flops_in((inner.function,)), inner.times)
    return total


def elements(aval: Any) -> int:
    """How many elements a value has."""
    return math.prod(getattr(aval, "shape", ()))


def _dot(params: Any, ins: Sequence[Any], outs: Sequence[Any]) -> int:
    (contracting, _), _ = params["dimension_numbers"]
    return 2 * elements(outs[0]) * _sizes(ins[0], contracting)


def _ragged_dot(params: Any, ins: Sequence[Any], outs: Sequence[Any]) -> int:
    """With full groups, which is the most it can be: each row meets one group's matrix."""
    numbers = params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return 2 * elements(outs[0]) * ins[0].shape[-1]
    (contracting, _), _ = numbers.dot_dimension_numbers
    count = 2 * elements(outs[0]) * _sizes(ins[0], contracting)
    # If the groups split the contracted dimension, the result has one slice for each.
    split = set(numbers.lhs_ragged_dimensions) <= set(contracting)
    return count // outs[0].shape[0] if split else count


def _convolution(params: Any, ins: Sequence[Any], outs: Sequence[Any]) -> int:
    out_features = ins[1].shape[params["dimension_numbers"].rhs_spec[0]]
    return 2 * elements(outs[0]) * elements(ins[1]) // max(1, out_features)


def _sizes(aval: Any, dimensions: Sequence[int]) -> int:
    return math.prod(aval.shape[dimension] for dimension in dimensions)


_COUNTERS = MappingProxyType(
    {
        "dot_general": _dot,
        "conv_general_dilated": _convolution,
        "ragged_dot": _ragged_dot,
        "ragged_dot_general": _ragged_dot,
    }
)
