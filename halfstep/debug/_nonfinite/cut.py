"""Select the few values that show whether all values of a program are finite.

Most operations pass a NaN or an infinity on: the result of `x + y` is not finite if `x` or `y` is
not. Such an operand needs no flag of its own, because the flag of the result covers it. A value
needs one only where an operation can hide it (`exp(-inf)` is zero), and so does the result of that
operation. These values cut the program into regions in which everything is passed on:

- if all of them are finite, then every value of the program is finite;
- if one of them is not finite, then neither is any value between it and the next ones that it
  reaches inside its region.

Only the region in which non-finite values begin must be looked at more closely.
"""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from halfstep._program import Constant, Node, Operand
from halfstep.debug._instrument.body import Body, every_operation

# Each result is not finite if an element of any operand is not: a sum with a NaN or an infinity is
# one, and so is a product, since infinity times zero is NaN. Not `conv_general_dilated`, whose
# strides may skip elements, and not `max`, `tanh` or `exp`, which are finite at an infinity.
_PASSES_ALL_ON = frozenset(
    {
        *("add", "add_any", "sub", "mul", "neg", "abs", "square", "sqrt", "cbrt", "log", "log1p"),
        *("dot_general", "reduce_sum", "cumsum", "concatenate", "convert_element_type"),
        *("halfstep_difference", "one_minus_square"),
    }
)
# Moves that may leave out the elements that are not finite.
_PARTIAL_MOVES = frozenset({"dynamic_slice", "slice", "split"})
# XLA may keep a float16 value in float32 if nothing reads its bits, and then no infinity appears.
_WIDE = frozenset({"bfloat16", "float32", "float64"})


def cut(body: Body) -> frozenset[int]:
    """Select the values of a function that show whether all of its values are finite."""
    graph, every = body.graph, every_operation(body)
    found = {*graph.inputs, *_roots(body, graph.outputs)}
    for index in body.live():
        node = graph.nodes[index]
        if body.is_move(index):
            continue
        hidden = [o for at, o in enumerate(node.ins) if not _is_passed_on(body, node, at)]
        found.update(_roots(body, hidden))
        if hidden or not all(map(_is_wide, (graph.avals[out] for out in node.outs))):
            found.update(node.outs)
    return frozenset(number for number in every if number in found)


def region(body: Body, number: int, known: frozenset[int]) -> Iterator[int]:
    """Yield the values from which a value is computed, back to the known ones, which are left out.

    Args:
        body: A function.
        number: One of its values.
        known: Values of the function that are selected by `cut`.
    """
    seen: set[int] = set()
    waiting = [number]
    while waiting:
        maker = body.graph.maker(waiting.pop())
        # The values inside a loop or a branch have regions of their own.
        if maker is None or maker in body.inner:
            continue
        for operand in _roots(body, body.graph.nodes[maker].ins) - known - seen:
            seen.add(operand)
            waiting.append(operand)
            yield operand


def _roots(body: Body, operands: Sequence[Operand]) -> set[int]:
    """Return the values that operands were moved from, without constants."""
    return {root for root in map(body.root, operands) if not isinstance(root, Constant)}


def _is_passed_on(body: Body, node: Node, position: int) -> bool:
    """Return whether a non-finite element of an operand makes the result non-finite, always."""
    operand = node.ins[position]
    if isinstance(operand, Constant):
        return True
    if not (node.name in _PASSES_ALL_ON or (node.name == "div" and position == 0)):
        return node.name == "integer_pow" and node.params["y"] > 0
    # A comparison or a cast to integers, and an empty sum, have nothing to show.
    shown = all(_is_wide(body.graph.avals[out]) for out in node.outs)
    return shown and _is_whole(body, operand)


def _is_whole(body: Body, operand: Operand) -> bool:
    """Return whether an operand has all elements of the value that it was moved from."""
    root = body.root(operand)
    while operand != root:
        maker = body.graph.maker(operand)
        if maker is None or body.graph.nodes[maker].name in _PARTIAL_MOVES:
            return False
        node = body.graph.nodes[maker]
        paired = len(node.ins) == len(node.outs)
        operand = node.ins[node.outs.index(operand) if paired else 0]  # pyright: ignore[reportArgumentType]
    return True


def _is_wide(aval: object) -> bool:
    """Return whether a value has elements, and a dtype with the range of float32."""
    dtype = getattr(aval, "dtype", np.dtype(bool))
    return jnp.issubdtype(dtype, jnp.floating) and dtype.name in _WIDE and bool(aval.size)  # pyright: ignore[reportAttributeAccessIssue]
