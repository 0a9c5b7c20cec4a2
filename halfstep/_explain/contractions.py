"""Findings: contractions that are not lowered, and results that may be beyond float16."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from halfstep._autocast import CONTRACTIONS, FLOAT32, Kind, Rule
from halfstep._explain.finding import ExplainFinding
from halfstep._explain.reasons import not_lowered
from halfstep._explain.walk import Step
from halfstep._program import Constant, Node, equations, functions_in, is_scalar_literal

FLOAT16 = np.dtype(np.float16)
_FACTOR = 256
"""Products of numbers around one have sums of tens or hundreds: times this, they reach 65,504."""
_SLOW = "It runs at the speed of float32, and keeps what it needs for the gradient in float32."


def unlowered(steps: list[Step], min_bytes: int) -> Iterator[ExplainFinding]:
    """Contractions that run in float32 or wider, and not because a rule says so."""
    for step in steps:
        entry = step.entry
        if entry.bytes_in + entry.bytes_out < min_bytes or entry.by:
            continue
        decision = step.place.plan.decisions[step.index]
        if entry.is_contraction and decision.rule not in (Rule.COMPUTE, Rule.FOLLOW):
            wide = [value for value in entry.ins[:2] if value.dtype in ("f32", "f64")]
            kept = Kind.KEPT in [step.place.kind(step.index, value) for value in step.node.ins[:2]]
            if not wide or kept:
                continue
            reason = not_lowered(step.place, step.index)
            fix = (
                "leave `precision=` out, or say that it is meant: "
                f'`rules=("{_rule(step, "float32")}",)`.'
                if "precision=" in reason
                else "write both operands in float32, or both in 16 bits."
            )
            yield _finding(step, f"`{entry.name}` stays {wide[0].dtype}: {reason}", fix)
        elif entry.name == "pallas_call" and _has_wide_dot(step):
            yield _finding(
                step,
                "a kernel that runs as it is written multiplies in float32",
                f"give the kernel operands that are cast, `.astype(jnp."
                f"{step.place.plan.settings.compute.name})`.",
            )


def unknown(steps: list[Step], min_bytes: int) -> Iterator[ExplainFinding]:
    """Operations of which nothing is known."""
    for step in steps:
        entry = step.entry
        if step.place.plan.decisions[step.index].known or entry.by:
            continue
        if entry.bytes_in + entry.bytes_out < min_bytes:
            continue
        if "f32" not in [value.dtype for value in (*entry.ins, *entry.outs)]:
            continue
        yield ExplainFinding(
            "unknown operation",
            entry.source,
            entry.scope,
            f"`{entry.name}` is in no table and runs in float32, as it is written",
            "Nobody has said in which precision it may run.",
            f'say it: `rules=("op:{entry.name}=compute",)`, or `=float32` if it is sensitive.',
            entry.bytes_in + entry.bytes_out,
        )


def ranges(steps: list[Step]) -> Iterator[ExplainFinding]:
    """Contractions in float16 whose result may be infinite."""
    largest = float(jnp.finfo(FLOAT16).max)
    for step in steps:
        if step.place.plan.settings.compute != FLOAT16:
            continue
        entry = step.entry
        found = entry.largest
        if found is not None and entry.outs[0].dtype == "f16" and not found <= largest / 2:
            what = f"`{entry.name}` makes numbers up to {found:.3g}; float16 ends at {largest:.0f}"
            yield _beyond(step, what)
        factor = _factor(step)
        if factor is not None:
            contraction = _made_low(step)
            if contraction is not None:
                what = f"the result of `{contraction.name}` is multiplied by {factor:g} in float16"
                yield _beyond(step, what, contraction.name)


def _beyond(step: Step, what: str, name: str | None = None) -> ExplainFinding:
    rule = _rule(step, "accumulate", name)
    return ExplainFinding(
        "range",
        step.entry.source,
        step.entry.scope,
        what,
        "What is beyond 65504 is infinite in float16, and the step is skipped.",
        f'keep the result in float32: `halfstep.Policy(compute="f16", rules=("{rule}",))`; '
        "or use bf16.",
        step.entry.bytes_out,
    )


def _factor(step: Step) -> float | None:
    """The number that a 16-bit value is multiplied by, if it is a large one."""
    if step.entry.name not in ("mul", "div") or step.entry.outs[0].dtype != "f16":
        return None
    for position, operand in enumerate(step.node.ins):
        if isinstance(operand, Constant) and is_scalar_literal(operand):
            value = abs(float(operand.value))
            if step.entry.name == "div":
                value = 1 / value if position == 1 and value else 0.0
            if value >= _FACTOR:
                return value
    return None


def _made_low(step: Step) -> Node | None:
    """The contraction whose result an operation takes, through all that only moves it."""
    plan = step.place.plan
    waiting = list(step.node.ins)
    while waiting:
        made_by = step.place.producer(waiting.pop())
        if made_by is None:
            continue
        node = plan.graph.nodes[made_by]
        if node.name in CONTRACTIONS:
            return node if Kind.LOW in plan.decisions[made_by].outs else None
        if plan.decisions[made_by].rule is Rule.FOLLOW and plan.decisions[made_by].inner is None:
            waiting += node.ins
    return None


def _finding(step: Step, what: str, fix: str) -> ExplainFinding:
    entry = step.entry
    total = entry.bytes_in + entry.bytes_out
    return ExplainFinding(
        "contraction not lowered", entry.source, entry.scope, what, _SLOW, fix, total
    )


def _rule(step: Step, outcome: str, name: str | None = None) -> str:
    """A rule for an operation, in its scope if it has one."""
    place = f"@{step.entry.scope}" if step.entry.scope else ""
    return f"op:{name or step.entry.name}{place}={outcome}"


def _has_wide_dot(step: Step) -> bool:
    return any(
        equation.primitive.name in CONTRACTIONS
        and all(getattr(var.aval, "dtype", None) == FLOAT32 for var in equation.invars[:2])
        for inner in functions_in(step.node.name, step.node.params)
        for equation in equations(inner.jaxpr)
    )
