"""Find products that only pick values: one factor is one-hot along the summed dimension.

Such a product is a gather that is written as a matrix product, as in `optax.ctc_loss`. Only one
term of each sum is not zero, so the result is one of the other factor's values, and nothing is
gained from rounding that value or its cotangent to 16 bits. The operations that make a factor show
whether it is one-hot: a comparison of integers with a count (`iota`), cast, moved and broadcast.
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
    """Return which factor of a product is one-hot, 0 or 1; `None` if the product does not pick."""
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
    """Return whether all readers of an operation's results round them to the compute dtype.

    Picking first and rounding first then give the same values.

    Args:
        node: The operation.
        graph: The graph that it is part of.
        rounds: Says whether another operation rounds its operands to the compute dtype.
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
    """Return the dimensions along which at most one element is 1, and the others are 0."""
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
    """Return the dimensions along which no two elements of a value are equal."""
    node = _made(graph, operand)
    if node is None:
        return _NONE
    aval = graph.aval(operand)
    if node.name == "iota":
        dimension = node.params["dimension"]
        return frozenset({dimension}) if _fits(aval.shape[dimension], aval.dtype) else _NONE
    numbers = [operand.value for operand in node.ins if isinstance(operand, Constant)]
    if node.name in ("add", "sub", "mul") and len(numbers) == 1 and np.ndim(numbers[0]) == 0:
        # A count that starts at another number, as in `jnp.eye(n, k=1)`.
        counted = next(operand for operand in node.ins if not isinstance(operand, Constant))
        return _counts(graph, counted) if node.name != "mul" or abs(numbers[0]) == 1 else _NONE
    if _narrows(graph, node):
        return _NONE
    return _through(graph, node, _counts)


def is_place(graph: Graph, operand: Operand, dimension: int) -> bool:
    """Return whether each element of a value is the element's own place along a dimension."""
    node = _made(graph, operand)
    if node is None or _narrows(graph, node):
        return False
    if node.name == "iota":
        aval = graph.aval(operand)
        return node.params["dimension"] == dimension and _fits(aval.shape[dimension], aval.dtype)
    if node.name == "select_n":
        # JAX adds the length to what is below zero. No place is.
        test, value, *_ = node.ins
        asked = _made(graph, test)
        if asked is None or asked.name != "lt" or asked.ins[0] != value:
            return False
        zero = asked.ins[1]
        is_zero = isinstance(zero, Constant) and not np.any(zero.value)
        return is_zero and is_place(graph, value, dimension)
    moved = _moved(graph, node).items()
    return any(new == dimension and is_place(graph, node.ins[0], old) for old, new in moved)


def _narrows(graph: Graph, node: Node) -> bool:
    """Return whether an operation casts to a type that may not hold all of its operand's counts."""
    if node.name != "convert_element_type":
        return False
    before, after = graph.aval(node.ins[0]), graph.avals[node.outs[0]]
    return not (_is_whole(after) and after.dtype.itemsize >= before.dtype.itemsize)


def _constant(graph: Graph, operand: Operand) -> _Dimensions:
    """Return the dimensions along which all elements of a value are equal."""
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
        # Elements are equal along dimensions that the operand lacks, or has with size 1.
        kept = frozenset(_moved(graph, node).values())
        return (every - kept) | _through(graph, node, _constant) | trivial
    return _through(graph, node, _constant) | trivial


def _through(
    graph: Graph, node: Node, find: Callable[[Graph, Operand], _Dimensions]
) -> _Dimensions:
    """Find dimensions of a moved operand, and return them as dimensions of the result."""
    moved = _moved(graph, node)
    if not moved:
        return _NONE
    return frozenset(moved[number] for number in find(graph, node.ins[0]) if number in moved)


def _moved(graph: Graph, node: Node) -> Mapping[int, int]:
    """Return where an operation that moves its operand puts each dimension; empty for others."""
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
    """Map the dimensions of a reshape that only adds or removes dimensions of size 1."""
    old, new = ([n for n, size in enumerate(shape) if size != 1] for shape in (before, after))
    if [before[n] for n in old] != [after[n] for n in new]:
        return {}
    return dict(zip(old, new, strict=True))


def _made(graph: Graph, operand: Operand) -> Node | None:
    made_by = graph.maker(operand)
    return None if made_by is None else graph.nodes[made_by]


def _fits(size: object, dtype: np.dtype) -> bool:
    """Return whether a dtype can count to a size; a count of 300 in 8 bits starts over.

    No array is longer than 32 bits can count, even if its size is still symbolic (`jax.export`).
    """
    if not jnp.issubdtype(dtype, np.integer):
        return False
    return dtype.itemsize >= 4 or (isinstance(size, int) and size - 1 <= np.iinfo(dtype).max)


def _is_whole(aval: ShapedArray) -> bool:
    return jnp.issubdtype(aval.dtype, np.integer)
