"""Find what is wrong with a function, where, and what to type."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from halfstep._autocast import CONTRACTIONS, FLOAT32, Kind, Rule
from halfstep._base import size
from halfstep._explain.entries import name_of
from halfstep._explain.reasons import not_lowered
from halfstep._explain.stored import Residual
from halfstep._explain.walk import Step
from halfstep._program import Constant, Node, Source, equations, functions_in, is_scalar_literal

FLOAT16 = np.dtype(np.float16)
_FACTOR = 256
"""Products of numbers around one sum to tens or hundreds: times this factor, to 65,504."""
_SLOW = "It runs at the speed of float32, and keeps what it needs for the gradient in float32."
_SUMS = frozenset(
    {
        *("cumlogsumexp", "cumprod", "cumsum", "psum", "psum_invariant", "reduce_prod"),
        *("reduce_scatter", "reduce_sum", "reduce_window_sum", "scatter-add", "scatter_add"),
    }
)


@dataclasses.dataclass(frozen=True)
class ExplainFinding:
    """Something that costs precision, memory or speed, and can be changed.

    Attributes:
        kind: `"promotion"`, `"low-precision reduction"`, `"float32 residual"`, `"model copy"`,
            `"contraction not lowered"`, `"unknown operation"`, `"range"` or `"loss scale"`.
        source: The line of the user's code.
        scope: The `jax.named_scope`s around it.
        what: What happens there.
        why: Why it matters.
        fix: What to type.
        bytes: The bytes of the values, all occurrences together.
        count: How many operations of the line it is about.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def columns(w, x):
            return jnp.sum((x @ w).astype("bfloat16"), axis=0, dtype="bfloat16")


        w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        (finding,) = halfstep.explain(columns, "bf16")(w, w).findings
        assert finding.kind == "low-precision reduction"
        assert "sum in float32" in finding.fix
        ```
    """

    kind: str
    source: Source
    scope: str
    what: str
    why: str
    fix: str
    bytes: int
    count: int = 1

    def __str__(self) -> str:
        often = f", {self.count} operations" if self.count > 1 else ""
        return (
            f"{self.source}: {self.kind}: {self.what} ({size(self.bytes)}{often})\n"
            f"    {self.why}\n"
            f"    Fix: {self.fix}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return dataclasses.asdict(self)


def merged(findings: Iterable[ExplainFinding]) -> tuple[ExplainFinding, ...]:
    """Merge equal findings on the same line, and add up their bytes and operations."""
    # `what` is not compared, because it names the operation: three sums on one line are one thing
    # to change.
    found: dict[tuple[object, ...], ExplainFinding] = {}
    for finding in findings:
        key = (finding.kind, finding.source, finding.why, finding.fix)
        if key in found:
            before = found[key]
            finding = dataclasses.replace(
                before, bytes=before.bytes + finding.bytes, count=before.count + finding.count
            )
        found[key] = finding
    return tuple(found.values())


# Findings about the program as it is written.


def low_reductions(steps: list[Step], min_bytes: int) -> Iterator[ExplainFinding]:
    """Report sums of 16-bit numbers that the user has written in 16 bits."""
    for step in steps:
        if step.entry.name not in _SUMS or not step.node.ins:
            continue
        dtype = step.place.plan.graph.aval(step.node.ins[0]).dtype
        if not _is_half(dtype) or step.entry.bytes_in < min_bytes:
            continue
        yield ExplainFinding(
            "low-precision reduction",
            step.entry.source,
            step.entry.scope,
            f"`{step.entry.name}` adds up numbers that are written in {name_of(dtype)}",
            f"The sum is rounded to {name_of(dtype)} at every step: small terms are lost.",
            "sum in float32, `x.astype(jnp.float32)` before it; or leave the function in float32 "
            "and let autocast cast.",
            step.entry.bytes_in,
        )


def model_copies(
    steps: list[Step], parameter_bytes: int, min_bytes: int
) -> Iterator[ExplainFinding]:
    """Report casts of most of the parameters to 16 bits, before they are used."""
    found = []
    for step in steps:
        if step.entry.name != "convert_element_type":
            continue
        (operand,) = step.node.ins
        is_parameter = not isinstance(operand, int) or step.place.producer(operand) is None
        if step.place.kind(step.index, operand) is not Kind.PARAM or not is_parameter:
            continue
        if _is_half(step.place.plan.graph.avals[step.node.outs[0]].dtype):
            found.append(step)
    # Casting one layer by hand is a choice. Casting most of the model is a habit from other
    # libraries, which costs the memory that autocast saves.
    copied = sum(step.entry.bytes_in * step.entry.count for step in found)
    if copied < min_bytes or 2 * copied < parameter_bytes:
        return
    for step in found:
        yield ExplainFinding(
            "model copy",
            step.entry.source,
            step.entry.scope,
            f"parameters are cast to {step.entry.outs[0].dtype} before they are used",
            "A copy of the model is kept from the first use to the last, and what is made of it, "
            "sums and norms too, runs in 16 bits.",
            "leave the cast out: autocast casts each parameter where it is used.",
            step.entry.bytes_in * step.entry.count,
        )


def stored_float32(
    found: Sequence[Residual], known: Collection[Source], min_bytes: int
) -> Iterator[ExplainFinding]:
    """Report large float32 residuals, except those of lines that are already known."""
    for residual in found:
        if residual.type.dtype != "f32" or residual.type.bytes < min_bytes:
            continue
        # Casts of arguments and broadcast constants can be recomputed: compilers need not store
        # them.
        if residual.of_argument or residual.is_constant or residual.source in known:
            continue
        yield ExplainFinding(
            "float32 residual",
            residual.source,
            residual.scope,
            f"`{residual.name}` makes {residual.type}, which is stored for the backward pass",
            "In the compute dtype it would take half of the memory.",
            "recompute it instead, with `jax.checkpoint` around it or without the `store:` rule "
            "that keeps it; or cast what it is made of.",
            residual.type.bytes,
        )


def _is_half(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2


# Findings about contractions, and about operations that are not known.


def unlowered(steps: list[Step], min_bytes: int) -> Iterator[ExplainFinding]:
    """Report contractions that run in float32 or wider, and not because a rule says so."""
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
        # A kernel is bound with the dtypes that it was written for, so autocast leaves it alone.
        elif entry.name == "pallas_call" and _has_wide_dot(step):
            yield _finding(
                step,
                "a kernel that runs as it is written multiplies in float32",
                f"give the kernel operands that are cast, `.astype(jnp."
                f"{step.place.plan.settings.compute.name})`.",
            )


def unknown(steps: list[Step], min_bytes: int) -> Iterator[ExplainFinding]:
    """Report operations that autocast has no rule for."""
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
    """Report contractions in float16 whose result may be infinite."""
    largest = float(jnp.finfo(FLOAT16).max)
    for step in steps:
        if step.place.plan.settings.compute != FLOAT16:
            continue
        entry = step.entry
        found = entry.largest
        # The limit is half of the range, since other data may be larger. NaN counts, too: it is not
        # less than the limit.
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
        "Values beyond 65504 are infinite in float16, and the step is skipped.",
        f'keep the result in float32: `halfstep.Policy(compute="f16", rules=("{rule}",))`; '
        "or use bf16.",
        step.entry.bytes_out,
    )


def _factor(step: Step) -> float | None:
    """Return the number that a 16-bit value is multiplied by, if it is a large one."""
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
    """Return the contraction whose result an operation takes, through all that only moves it."""
    plan = step.place.plan
    waiting = list(step.node.ins)
    while waiting:
        made_by = step.place.producer(waiting.pop())
        if made_by is None:
            continue
        node = plan.graph.nodes[made_by]
        if node.name in CONTRACTIONS:
            return node if Kind.LOW in plan.decisions[made_by].outs else None
        # Follow only operations that move values: after arithmetic, it is not the product that
        # grows.
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
    """Return a rule for an operation, in its scope if it has one."""
    place = f"@{step.entry.scope}" if step.entry.scope else ""
    return f"op:{name or step.entry.name}{place}={outcome}"


def _has_wide_dot(step: Step) -> bool:
    return any(
        equation.primitive.name in CONTRACTIONS
        and all(getattr(var.aval, "dtype", None) == FLOAT32 for var in equation.invars[:2])
        for inner in functions_in(step.node.name, step.node.params)
        for equation in equations(inner.jaxpr)
    )
