"""How large a value can be at most, as far as the operations say it.

Float32 values that are read again after the next contraction are held in the compute dtype. Float16
ends at 65,504: a square or a sum may be beyond that, and would be stored as infinity where float32
was finite. So what is not known to fit stays float32. Bfloat16 has float32's range.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from halfstep._autocast.kinds import Kind
from halfstep._autocast.table import PASSING
from halfstep._program import Constant, Graph, Node, size

LARGEST = float(np.finfo(np.float16).max)

_Rule = Callable[[Sequence[float], Node, Graph], float]


def _largest(ins: Sequence[float], *_: Any) -> float:
    return max(ins, default=math.inf)


def _first(ins: Sequence[float], *_: Any) -> float:
    return ins[0]


def _product(ins: Sequence[float], *_: Any) -> float:
    # Nothing is known of zero times infinity.
    return math.inf if math.inf in ins else math.prod(ins)


def _power(ins: Sequence[float], node: Node, _: Graph) -> float:
    exponent = node.params.get("y", 2)
    return ins[0] ** exponent if exponent >= 0 and ins[0] < 1e30 else math.inf


def _quotient(ins: Sequence[float], node: Node, _: Graph) -> float:
    divisor = node.ins[1]
    if not isinstance(divisor, Constant) or not np.all(divisor.value):
        return math.inf
    return ins[0] / float(np.min(np.abs(divisor.value)))


def _total(ins: Sequence[float], node: Node, graph: Graph) -> float:
    return ins[0] * size(graph.aval(node.ins[0])) / max(size(graph.avals[node.outs[0]]), 1)


def _clamped(ins: Sequence[float], *_: Any) -> float:
    low, value, high = ins
    return min(value, max(low, high))


# Operations that hand values on and take several of them; the others take one, and then indices.
_OF_SEVERAL = frozenset(
    {
        *("max", "min", "concatenate", "stack", "pad", "optimization_barrier", "device_put"),
        *("pmax", "pmin", "dynamic_update_slice", "scatter"),
    }
)
_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        **dict.fromkeys((*PASSING, "convert_element_type"), _first),
        **dict.fromkeys(_OF_SEVERAL, _largest),
        **dict.fromkeys(("tanh", "logistic", "erf", "sin", "cos", "sign"), lambda *_: 1.0),
        "erfc": lambda *_: 2.0,
        **dict.fromkeys(("add", "sub", "add_any"), lambda ins, *_: sum(ins)),
        "mul": _product,
        **dict.fromkeys(("integer_pow", "square"), _power),
        "div": _quotient,
        "reduce_sum": _total,
        "sqrt": lambda ins, *_: math.sqrt(ins[0]),
        "clamp": _clamped,
        "select_n": lambda ins, *_: max(ins[1:]),
    }
)


def bound(node: Node, graph: Graph, kinds: Sequence[Kind], bounds: Sequence[float]) -> float:
    """The largest size of an operation's results.

    Args:
        node: The operation.
        graph: What it is part of.
        kinds: Those of its operands.
        bounds: Of each value that has been made, by its number.
    """
    rule = _RULES.get(node.name)
    if rule is None:
        return math.inf
    ins = []
    for operand, kind in zip(node.ins, kinds, strict=True):
        if isinstance(operand, Constant):
            ins.append(_size_of(np.asarray(operand.value)))
        else:
            # A value that is stored in float16 is at most float16's maximum.
            ins.append(min(bounds[operand], LARGEST) if kind.is_low else bounds[operand])
    return rule(ins, node, graph)


def _size_of(value: np.ndarray) -> float:
    """The largest magnitude in a constant; infinite for a constant without numbers (float0)."""
    if not jnp.issubdtype(value.dtype, np.number) and value.dtype != np.dtype(bool):
        return math.inf
    return float(np.max(np.abs(value), initial=0))
