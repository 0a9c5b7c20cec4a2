"""What is one function: layers that are written out repeat their islands and calls.

JAX keeps what it has derived of a function (its trace, derivative and transpose) by the function.
Twelve layers that share it are differentiated once.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from halfstep._autocast.islands import Island
from halfstep._autocast.types import Decision, Plan
from halfstep._program import Constant, Operand


def island_signature(plan: Plan, island: Island) -> Hashable:
    """Equal for islands of a plan that are the same function of what comes in.

    Lines of the source and named scopes are part of it, so that each operation keeps its own.
    """
    numbers = {number: position for position, number in enumerate(island.inputs)}
    parts = tuple(_operation(plan, index, numbers) for index in island.nodes)
    reads = tuple((plan.graph.avals[number], dtype) for number, dtype in island.reads)
    outputs = tuple((numbers[number], dtype) for number, dtype in island.outputs)
    return reads, parts, outputs


def signature(plan: Plan, index: int) -> Hashable:
    """The same for a single operation, such as a call."""
    operands = plan.graph.nodes[index].ins
    numbers: dict[int, int] = {}
    for operand in operands:
        if not isinstance(operand, Constant):
            numbers.setdefault(operand, len(numbers))
    return _operation(plan, index, numbers)


def _operation(plan: Plan, index: int, numbers: dict[int, int]) -> Hashable:
    node, level = plan.graph.nodes[index], plan.levels[index]
    ins = tuple(_operand(plan, operand, level, numbers) for operand in node.ins)
    for number in node.outs:
        numbers[number] = len(numbers)
    return (
        node.primitive,
        tuple((name, _key(node.params[name])) for name in sorted(node.params)),
        ins,
        tuple(plan.graph.avals[number] for number in node.outs),
        _decision(plan.decisions[index]),
        _key(node.source.name_stack),
        _key(node.source.traceback),
    )


def _operand(
    plan: Plan, operand: Operand, level: int, numbers: Mapping[int, int]
) -> tuple[Hashable, ...]:
    kind = plan.seen(operand, level)
    if not isinstance(operand, Constant):
        return numbers[operand], kind
    value = np.asarray(operand.value)
    return "constant", kind, operand.aval, value.dtype, value.tobytes()


def _decision(decision: Decision) -> Hashable:
    # What is planned for the inside follows from the operation and its operands.
    names = (field.name for field in dataclasses.fields(decision) if field.name != "inner")
    return tuple(_key(getattr(decision, name)) for name in names)


def _key(value: Any) -> Hashable:
    """A value to compare by; what cannot be compared is equal to itself only."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
