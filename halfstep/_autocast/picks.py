"""Products that only pick: one factor is one-hot along the dimension that is summed.

Such a product is a gather that is written as a matrix product, as `optax.ctc_loss` has it. Of each
sum one term is not zero, so the result is one of the other factor's values, and nothing is gained
from rounding that value or its cotangent to 16 bits. What is one-hot is read off the operations
that make it: a comparison of whole numbers with a count (`iota`), cast, moved and spread.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from halfstep._autocast.primitives import PASSING
from halfstep._program import Constant, Graph, Node, Operand, is_scalar_literal

PICKS = "it only picks values, by a one-hot factor"
_Dimensions = frozenset[int]
_NONE: _Dimensions = frozenset()
# Each result element is the operand's element at the same place, or its cast.
_IN_PLACE = frozenset(
    {"convert_element_type", "copy", "halfstep_settle", "name", "sharding_constraint"}
    | {"stop_gradient", "reshard"}
)


def picking_factor(node: Node, graph: Graph) -> int | None:
    """Which factor of a product is the one-hot one: 0 or 1; `None` if the product does not pick."""
    if node.name != "dot_general":
        return None
    summed, _ = node.params["dimension_numbers"]
    for position in (0, 1):
        shape = graph.aval(node.ins[position]).shape
        long = {dimension for dimension in summed[position] if shape[dimension] != 1}
        if len(long) == 1 and long <= _one_hot(graph, node.ins[position]):
            return position
    return None


def is_rounded_by_readers(node: Node, graph: Graph, rounds: Callable[[Node], bool]) -> bool:
    """Whether all readers of what an operation makes round it to the compute dtype.

    To pick first or to round first is then the same.

    Args:
        node: The operation.
        graph: What it is part of.
        rounds: Whether another operation rounds its operands to the compute dtype.
    """
    waiting = list(node.outs)
    while waiting:
        number = waiting.pop()
        if number in graph.returned:
            return False
        for index in graph.users[number]:
            user = graph.nodes[index]
            if user.name in PASSING:
                waiting += user.outs
            elif not rounds(user):
                return False
    return True


def _one_hot(graph: Graph, operand: Operand) -> _Dimensions:
    """The dimensions along which at most one element of a value is 1, and the others are 0."""
    node = _made(graph, operand)
    if node is None:
        return _NONE
    if node.name == "eq" and _is_whole(graph.aval(node.ins[0])):
        left, right = node.ins
        return (_counts(graph, left) & _constant(graph, right)) | (
            _counts(graph, right) & _constant(graph, left)
        )
    return _through(graph, node, _one_hot)


def _counts(graph: Graph, operand: Operand) -> _Dimensions:
    """The dimensions along which no two elements of a value are equal."""
    node = _made(graph, operand)
    if node is None:
        return _NONE
    aval = graph.aval(operand)
    if node.name == "iota":
        dimension = node.params["dimension"]
        return frozenset({dimension}) if _fits(aval.shape[dimension], aval.dtype) else _NONE
    numbers = [operand.value for operand in node.ins if isinstance(operand, Constant)]
    if node.name in ("add", "sub", "mul") and len(numbers) == 1 and np.ndim(numbers[0]) == 0:
        # A count from another number on, as `jnp.eye(n, k=1)` has it.
        counted = next(operand for operand in node.ins if not isinstance(operand, Constant))
        return _counts(graph, counted) if node.name != "mul" or abs(numbers[0]) == 1 else _NONE
    if node.name == "convert_element_type":
        before = graph.aval(node.ins[0])
        if not (_is_whole(aval) and aval.dtype.itemsize >= before.dtype.itemsize):
            return _NONE
    return _through(graph, node, _counts)


def _constant(graph: Graph, operand: Operand) -> _Dimensions:
    """The dimensions along which all elements of a value are equal."""
    shape = getattr(graph.aval(operand), "shape", ())
    every = frozenset(range(len(shape)))
    if is_scalar_literal(operand):
        return every
    trivial = frozenset(dimension for dimension in every if shape[dimension] == 1)
    node = _made(graph, operand)
    if node is None:
        return trivial
    if node.name == "iota":
        return every - {node.params["dimension"]} | trivial
    if node.name == "broadcast_in_dim":
        # Where the operand has no such dimension, or one of size 1.
        kept = frozenset(_moved(graph, node).values())
        return (every - kept) | _through(graph, node, _constant) | trivial
    return _through(graph, node, _constant) | trivial


def _through(
    graph: Graph, node: Node, find: Callable[[Graph, Operand], _Dimensions]
) -> _Dimensions:
    """What is found of the operand of an operation that moves it, in the result's dimensions."""
    moved = _moved(graph, node)
    if not moved:
        return _NONE
    return frozenset(moved[number] for number in find(graph, node.ins[0]) if number in moved)


def _moved(graph: Graph, node: Node) -> Mapping[int, int]:
    """Where an operation that moves its operand has put each dimension; empty for all others."""
    if not node.ins or isinstance(node.ins[0], Constant):
        return {}
    before, after = graph.aval(node.ins[0]).shape, graph.avals[node.outs[0]].shape
    if node.name in _IN_PLACE:
        return dict(enumerate(range(len(before))))
    if node.name == "broadcast_in_dim":
        placed = enumerate(node.params["broadcast_dimensions"])
        return {old: new for old, new in placed if before[old] == after[new]}
    if node.name == "transpose":
        return {old: new for new, old in enumerate(node.params["permutation"])}
    if node.name in ("reshape", "squeeze", "expand_dims"):
        return _without_ones(before, after)
    return {}


def _without_ones(before: tuple[int, ...], after: tuple[int, ...]) -> Mapping[int, int]:
    """The dimensions of a reshape that only puts in or takes out dimensions of size 1."""
    old, new = ([n for n, size in enumerate(shape) if size != 1] for shape in (before, after))
    if [before[n] for n in old] != [after[n] for n in new]:
        return {}
    return dict(zip(old, new, strict=True))


def _made(graph: Graph, operand: Operand) -> Node | None:
    made_by = graph.maker(operand)
    return None if made_by is None else graph.nodes[made_by]


def _fits(size: object, dtype: np.dtype) -> bool:
    """Whether a dtype counts to a size; a count of 300 in 8 bits begins anew.

    No array is as long as 32 bits count, also where its size has no number yet (`jax.export`).
    """
    if not jnp.issubdtype(dtype, np.integer):
        return False
    return dtype.itemsize >= 4 or (isinstance(size, int) and size - 1 <= np.iinfo(dtype).max)


def _is_whole(aval: ShapedArray) -> bool:
    return jnp.issubdtype(aval.dtype, np.integer)
