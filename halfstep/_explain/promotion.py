"""Findings: float32 that nobody has asked for, and that goes on."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from halfstep._autocast import Kind, Rule
from halfstep._explain.entry import name_of
from halfstep._explain.finding import ExplainFinding
from halfstep._explain.origins import Origin, constant_value, origins, region
from halfstep._explain.reasons import described
from halfstep._explain.walk import Step
from halfstep._program import Finder, is_traced


def promotions(steps: list[Step], finder: Finder, min_bytes: int) -> Iterator[ExplainFinding]:
    """Where a 16-bit value meets a float32 one that has no need to be, and becomes float32."""
    covered: set[tuple[tuple[int, ...], int]] = set()
    for step in steps:
        if (step.place.key, step.index) in covered or step.entry.bytes_out < min_bytes:
            continue
        causes = _causes(step, min_bytes)
        if not causes:
            continue
        members, reaches = region(step.place, step.index)
        if not reaches:
            # It would be float32 a moment later: a mask before a softmax, a target in a loss.
            continue
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


def _causes(step: Step, min_bytes: int) -> list[Origin]:
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
        for origin in origins(place, operand)
    ]
    return [] if any(origin.kind == "operation" for origin in found) else found


def _texts(origin: Origin, compute: np.dtype, finder: Finder) -> tuple[str, str]:
    """What the cause is, and what to do about it."""
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
    limits = jnp.finfo(compute)
    value = constant_value(origin.place, origin.operand)
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
