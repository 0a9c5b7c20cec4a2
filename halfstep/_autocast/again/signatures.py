"""Tell which operations, regions and layers of a plan are the same function.

Layers that are written out one after the other repeat their operations. JAX caches what it derives
from a function (its trace, derivative and transpose) by the function, so twelve layers that share
one function are differentiated once.

A signature holds everything that running an operation depends on, and its source line, so that each
operation keeps its own line. Named scopes count only as far as they differ inside the function: a
shared function is called in the scopes that all of its operations are in.
"""

import dataclasses
import operator
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from jax.extend.source_info_util import NameStack

from halfstep._autocast.again.regions import Region
from halfstep._autocast.plans import Decision, Plan
from halfstep._program import Constant, Operand


class Signatures:
    """The signatures of one plan. They compare with each other, not with those of other plans."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        # Operations are compared by small numbers: the parts of a signature are long.
        self._numbers: dict[Hashable, int] = {}
        self._of: dict[int, int] = {}
        self._regions: dict[tuple[int, ...], int] = {}

    def operation(self, index: int) -> int:
        """Return a number that is equal for operations that differ only in their values."""
        if index not in self._of:
            self._of[index] = self.number(self._parts(index))
        return self._of[index]

    def number(self, signature: Hashable) -> int:
        """Return a short form of a signature."""
        return self._numbers.setdefault(signature, len(self._numbers))

    def function(self, indices: Iterable[int], numbers: dict[int, int], entered: int) -> Hashable:
        """Return a signature of operations that run one after the other, as one function.

        Args:
            indices: The operations.
            numbers: The place of each value that comes in; values that are made are added to it.
            entered: The number of scopes that all operations share.
        """
        parts = []
        stack = inside = None
        for index in indices:
            node = self._plan.graph.nodes[index]
            if inside is None or node.source.name_stack is not stack:
                stack = node.source.name_stack
                inside = _key(stack[entered:])
            values = (operand for operand in node.ins if not isinstance(operand, Constant))
            places = tuple(numbers[value] for value in values)
            for number in node.outs:
                numbers[number] = len(numbers)
            parts.append((self.operation(index), places, inside))
        return tuple(parts)

    def region(self, region: Region) -> int:
        """Return a signature of a region."""
        if region.nodes not in self._regions:
            self._regions[region.nodes] = self.number(("region", self._region(region)))
        return self._regions[region.nodes]

    def _region(self, region: Region) -> Hashable:
        plan = self._plan
        numbers = {number: position for position, number in enumerate(region.inputs)}
        parts = self.function(region.nodes, numbers, shared_scopes(plan, region.nodes))
        reads = tuple((plan.graph.avals[number], dtype) for number, dtype in region.reads)
        outputs = tuple((numbers[number], dtype) for number, dtype in region.outputs)
        return reads, parts, outputs

    def call(self, index: int) -> Hashable:
        """Return a signature of a single operation, such as a call."""
        numbers: dict[int, int] = {}
        for operand in self._plan.graph.nodes[index].ins:
            if not isinstance(operand, Constant):
                numbers.setdefault(operand, len(numbers))
        return self.function((index,), numbers, 0)

    def _parts(self, index: int) -> Hashable:
        plan = self._plan
        node = plan.graph.nodes[index]
        return (
            node.primitive,
            tuple(node.params),
            _keys(node.params.values()),
            tuple(_operand(plan, operand, index) for operand in node.ins),
            tuple(plan.graph.avals[number] for number in node.outs),
            _keys(_decided(plan.decisions[index])),
            _key(node.source.traceback),
        )


def shared_scopes(plan: Plan, indices: Sequence[int]) -> int:
    """Return how many scopes, beginning with the outermost, all of the operations are in."""
    # Operations of one scope mostly have the same object for a stack.
    stacks = {
        id(stack): stack for stack in (plan.graph.nodes[i].source.name_stack for i in indices)
    }
    first, *others = stacks.values()
    count = min(map(len, stacks.values()))
    return min((_common(first, other, count) for other in others), default=count)


def _common(ours: NameStack, theirs: NameStack, most: int) -> int:
    return next((n for n in range(most) if ours[n : n + 1] != theirs[n : n + 1]), most)


def _operand(plan: Plan, operand: Operand, index: int) -> tuple[Hashable, ...]:
    kind = plan.seen(operand, index)
    if not isinstance(operand, Constant):
        return kind, plan.kinds[operand], plan.roundings[operand], plan.graph.avals[operand]
    value = np.asarray(operand.value)
    return kind, operand.aval, value.dtype, value.tobytes()


# All but the plan of the inside, which follows from the operation and its operands.
_decided = operator.attrgetter(
    *(field.name for field in dataclasses.fields(Decision) if field.name != "inner")
)


def _keys(values: Iterable[object]) -> Hashable:
    """Return some values to compare by."""
    found = tuple(values)
    try:
        hash(found)
    except TypeError:
        return tuple(map(_key, found))
    # Types too: 1, 1.0 and True are equal.
    return tuple(map(type, found)), found


def _key(value: object) -> Hashable:
    """Return a value to compare by; a value without a hash is equal only to itself."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
