"""Find float32 that nobody has asked for, where it comes from, and how far it goes."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from halfstep._autocast import Kind, Rule
from halfstep._explain.entries import name_of
from halfstep._explain.findings import ExplainFinding
from halfstep._explain.places import PlanPlace
from halfstep._explain.reasons import described
from halfstep._explain.walk import Step
from halfstep._program import Constant, Finder, Operand, is_traced

# The rules of operations that run in the dtype of their operands.
_FOLLOWERS = (Rule.WIDEST, Rule.FOLLOW)


@dataclasses.dataclass(frozen=True)
class WideOrigin:
    """Where a float32 value comes from."""

    kind: str
    """`"constant"`, `"conversion"`, `"argument"`, or `"operation"`: one that belongs in float32."""
    place: PlanPlace
    operand: Operand


def promotions(steps: list[Step], finder: Finder, min_bytes: int) -> Iterator[ExplainFinding]:
    """Report where a 16-bit value becomes float32 because it meets a needless float32 value."""
    covered: set[tuple[tuple[int, ...], int]] = set()
    for step in steps:
        if (step.place.key, step.index) in covered or step.entry.bytes_out < min_bytes:
            continue
        causes = _causes(step, min_bytes)
        if not causes:
            continue
        members, reaches = _region(step.place, step.index)
        if not reaches:
            # The value would soon be float32 anyway: a mask before a softmax, a target in a loss.
            continue
        # Operations that are float32 because of this one are not reported again: they have the same
        # cause.
        covered |= {(step.place.key, member) for member in members}
        compute = step.place.plan.settings.compute
        for cause in causes:
            what, fix = _texts(cause, compute, finder)
            name = name_of(compute)
            yield ExplainFinding(
                "promotion",
                step.entry.source,
                step.entry.scope,
                f"`{step.entry.name}` widens {name} to float32 because of {what}",
                "It runs in float32, and so does what follows, up to the next contraction.",
                fix,
                step.entry.bytes_out,
            )


def _causes(step: Step, min_bytes: int) -> list[WideOrigin]:
    place, index = step.place, step.index
    decision = place.plan.decisions[index]
    if decision.rule is not Rule.WIDEST or decision.by or Kind.WIDE not in decision.outs:
        return []
    kinds = [place.kind(index, operand) for operand in step.node.ins]
    sizes = [value.bytes for value in step.entry.ins]
    if not any(k is Kind.LOW and s >= min_bytes for k, s in zip(kinds, sizes, strict=True)):
        return []
    found = [
        origin
        for operand, kind in zip(step.node.ins, kinds, strict=True)
        if kind in (Kind.WIDE, Kind.KEPT)
        for origin in _origins(place, operand)
    ]
    # If one operand is float32 for a reason, such as the result of a softmax, then changing the
    # others changes nothing.
    return [] if any(origin.kind == "operation" for origin in found) else found


def _texts(origin: WideOrigin, compute: np.dtype, finder: Finder) -> tuple[str, str]:
    """Return what the cause is, and what to do about it."""
    name = name_of(compute)
    what = described(origin.place, origin.operand, finder)
    if origin.kind == "argument":
        return what, (
            f"cast it where it is used, `.astype(jnp.{compute.name})`, or pass it with the "
            "parameters (`params=`) if it is one."
        )
    if origin.kind == "conversion":
        return f"the float32 of {what}", (
            f"convert to `jnp.{compute.name}` there, or leave the conversion out."
        )
    # Only constants are left. A constant that the compute dtype can hold takes the dtype of what it
    # meets, so this constant is too large or too small for the compute dtype.
    limits = jnp.finfo(compute)
    value = _constant_value(origin.place, origin.operand)
    if value is None or is_traced(value):
        return what, f"use numbers that {name} can hold."
    sizes = np.abs(value[np.isfinite(value) & (value != 0)].astype(np.float64))
    if sizes.max() > float(limits.max):
        return f"{what}, which {name} cannot hold", (
            f"use `jnp.inf` or a number up to {float(limits.max):.5g}."
        )
    return f"{what}, which vanishes in {name}", (
        f"use a number of at least {float(limits.tiny):.1e} (`jnp.finfo(jnp.{compute.name}).tiny`)."
    )


def _origins(place: PlanPlace, operand: Operand) -> Iterator[WideOrigin]:
    """Yield the origins of a float32 value, through all operations that only hand it on."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    waiting: list[tuple[PlanPlace, Operand]] = [(place, operand)]
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, Constant):
            yield WideOrigin("constant", where, value)
            continue
        if (where.key, value) in seen:
            continue
        seen.add((where.key, value))
        made_by = where.producer(value)
        if made_by is None:
            outside = _outside(where, value)
            if isinstance(outside, WideOrigin):
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
            yield WideOrigin("conversion" if converted else "operation", where, value)


def _outside(place: PlanPlace, value: int) -> WideOrigin | tuple[PlanPlace, Operand]:
    """Return what an input of a plan is outside the plan."""
    position = place.input_position(value)
    if position is None:
        return WideOrigin("constant", place, value)
    if place.plan.kinds[value] is Kind.KEPT:
        return WideOrigin("operation", place, value)
    if place.outer is None:
        return WideOrigin("argument", place, value)
    given = place.given[position]
    return WideOrigin("operation", place, value) if given is None else (place.outer, given)


def _region(place: PlanPlace, index: int) -> tuple[frozenset[int], bool]:
    """Find what runs in float32 because an operation does.

    Returns:
        The operations, and whether their float32 reaches anything that would not be in float32 by
        itself: a contraction, a loop, or what a loop hands on.
    """
    plan = place.plan
    members = {index}
    waiting = [index]
    reaches = False
    while waiting:
        for number in plan.graph.nodes[waiting.pop()].outs:
            if plan.kinds[number] is Kind.OTHER:
                continue
            # The operations after a loop or a call are not examined: they may be anything.
            reaches |= place.outer is not None and number in plan.graph.outputs
            for user in plan.graph.users[number] - members:
                decision = plan.decisions[user]
                if decision.rule in _FOLLOWERS and decision.inner is None:
                    members.add(user)
                    waiting.append(user)
                elif decision.rule is not Rule.FLOAT32:
                    reaches = True
    return frozenset(members), reaches


def _constant_value(place: PlanPlace, operand: Operand) -> np.ndarray | None:
    """Return the numbers of a constant; `None` if they are not known."""
    if isinstance(operand, Constant):
        return np.asarray(operand.value)
    found = dict(place.plan.graph.constants).get(operand)
    return None if found is None or not hasattr(found, "__array__") else np.asarray(found)
