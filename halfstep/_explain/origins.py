"""Where the float32 of a value comes from, and how far it goes."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from halfstep._autocast import Kind, Rule
from halfstep._explain.places import Place
from halfstep._program import Constant, Operand

# What goes on in the dtype of its operands.
_FOLLOWERS = (Rule.WIDEST, Rule.FOLLOW)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a float32 value comes from."""

    kind: str
    """`"constant"`, `"conversion"`, `"argument"`, or `"operation"`: one that belongs in float32."""
    place: Place
    operand: Operand


def origins(place: Place, operand: Operand) -> Iterator[Origin]:
    """The origins of a value that is float32, through all that only hands it on."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    waiting: list[tuple[Place, Operand]] = [(place, operand)]
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, Constant):
            yield Origin("constant", where, value)
            continue
        if (where.key, value) in seen:
            continue
        seen.add((where.key, value))
        made_by = where.producer(value)
        if made_by is None:
            outside = _outside(where, value)
            if isinstance(outside, Origin):
                yield outside
            else:
                waiting.append(outside)
            continue
        node, decision = where.plan.graph.nodes[made_by], where.plan.decisions[made_by]
        if decision.rule in _FOLLOWERS and decision.inner is None and not decision.by:
            for given in node.ins:
                if where.kind(made_by, given) in (Kind.WIDE, Kind.KEPT):
                    waiting.append((where, given))
        else:
            converted = node.name == "convert_element_type" and decision.rule is Rule.AS_TRACED
            yield Origin("conversion" if converted else "operation", where, value)


def _outside(place: Place, value: int) -> Origin | tuple[Place, Operand]:
    """What an input of a plan is, outside of it."""
    position = place.input_position(value)
    if position is None:
        return Origin("constant", place, value)
    if place.plan.kinds[value] is Kind.KEPT:
        return Origin("operation", place, value)
    if place.outer is None:
        return Origin("argument", place, value)
    given = place.given[position]
    return Origin("operation", place, value) if given is None else (place.outer, given)


def region(place: Place, index: int) -> tuple[frozenset[int], bool]:
    """What runs in float32 because an operation does.

    Returns:
        The operations, and whether their float32 reaches anything that would not be in float32 by
        itself: a contraction, a loop, what a loop hands on.
    """
    plan = place.plan
    members = {index}
    waiting = [index]
    reaches = False
    while waiting:
        for number in plan.graph.nodes[waiting.pop()].outs:
            if plan.kinds[number] is Kind.OTHER:
                continue
            reaches |= place.outer is not None and number in plan.graph.outputs
            for user in plan.graph.users[number] - members:
                decision = plan.decisions[user]
                if decision.rule in _FOLLOWERS and decision.inner is None:
                    members.add(user)
                    waiting.append(user)
                elif decision.rule is not Rule.FLOAT32:
                    reaches = True
    return frozenset(members), reaches


def constant_value(place: Place, operand: Operand) -> np.ndarray | None:
    """The numbers of a constant; `None` if they are not known."""
    if isinstance(operand, Constant):
        return np.asarray(operand.value)
    found = dict(place.plan.graph.constants).get(operand)
    return None if found is None or not hasattr(found, "__array__") else np.asarray(found)
