"""What is wrong with a function, where, and what to type."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from halfstep._base import size
from halfstep._program import Source


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
        bytes: How large the values are, all occurrences together.
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
        """Everything as plain values for JSON."""
        return dataclasses.asdict(self)


def merged(findings: Iterable[ExplainFinding]) -> tuple[ExplainFinding, ...]:
    """One finding for what is the same on the same line, with bytes and operations added up."""
    found: dict[tuple[Any, ...], ExplainFinding] = {}
    for finding in findings:
        key = (finding.kind, finding.source, finding.why, finding.fix)
        if key in found:
            before = found[key]
            finding = dataclasses.replace(
                before, bytes=before.bytes + finding.bytes, count=before.count + finding.count
            )
        found[key] = finding
    return tuple(found.values())
