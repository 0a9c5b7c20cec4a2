"""List every saved activation with what was decided about it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from halfstep._autocast import StoreLabel
from halfstep._explain.entries import Typed
from halfstep._explain.stored import Residual
from halfstep._explain.walk import Step
from halfstep._program import Source


@dataclasses.dataclass(frozen=True)
class ExplainResidual:
    """A value that is kept from the forward to the backward pass, or that a rule recomputes.

    Attributes:
        operation: The operation that makes it.
        source: Where the operation is written.
        scope: The named scopes that it is in.
        type: Its type as it is kept, with the elements of all iterations of a loop.
        decision: `"keep"`, `"e4m3"`, `"e5m2"`, `"int4"`, `"offload"` or `"recompute"`; `"scales"`
            for the scales and offsets of elements in 8 or 4 bits.
        by: The policy's rule that has decided, if one has.
        bytes: The bytes that are kept; zero if it is recomputed.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def loss(w, x):
            return jnp.sum(jnp.tanh(x @ w) ** 2)


        report = halfstep.explain(loss, "bf16,store:op:dot_general=e4m3")(
            jnp.ones((64, 64)), jnp.ones((32, 64))
        )
        kept = {found.decision: found.bytes for found in report.residuals}
        assert kept == {"e4m3": 32 * 64, "scales": 32 * 2}
        ```
    """

    operation: str
    source: Source
    scope: str
    type: Typed
    decision: str
    by: str
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "operation": self.operation,
            "source": str(self.source),
            "scope": self.scope,
            "type": str(self.type),
            "decision": self.decision,
            "by": self.by,
            "bytes": self.bytes,
        }


def rows(stored: Sequence[Residual], steps: Sequence[Step]) -> tuple[ExplainResidual, ...]:
    """List what is kept, the largest first, and then what rules recompute.

    Args:
        stored: The values kept for the backward pass.
        steps: All operations.
    """
    kept = [_kept(found) for found in stored if not found.of_argument and not found.is_constant]
    kept.sort(key=lambda row: -row.bytes)
    again = []
    for step in steps:
        decision = step.place.plan.decisions[step.index]
        if decision.stored_by and decision.store is None:
            entry = step.entry
            again += [
                ExplainResidual(
                    *(entry.name, entry.source, entry.scope, out),
                    *("recompute", decision.stored_by, 0),
                )
                for out in entry.outs
            ]
    return (*kept, *again)


def _kept(found: Residual) -> ExplainResidual:
    label, scope = StoreLabel.read(found.label), found.scope
    if label is None:
        decision = "e4m3" if found.type.dtype == "e4m3" else "keep"
        return ExplainResidual(
            found.name, found.source, scope, found.type, decision, "", found.type.bytes
        )
    elements = {"e4m3": "e4m3", "e5m2": "e5m2", "int4": "uint8"}.get(label.code)
    if elements is None:
        decision = "offload" if label.is_moved else "keep"
    elif found.type.dtype == elements:
        decision = label.code
    else:
        # A value that is too small for a code is kept as it is, and has no scales.
        decision = "scales" if label.is_encoded else "keep"
    return ExplainResidual(
        label.operation, found.source, scope, found.type, decision, label.by, found.type.bytes
    )
