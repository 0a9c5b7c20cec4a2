"""The answer to: why is this float32?"""

import dataclasses
import os
from typing import Any

from halfstep._explain._entry import ExplainEntry
from halfstep._explain._errors import LintError
from halfstep._explain._finding import ExplainFinding
from halfstep._explain._html import html
from halfstep._explain._text import misses, summary, table
from halfstep._explain._totals import ExplainTotals
from halfstep._recipe import Recipe
from halfstep._reports import Report


@dataclasses.dataclass(frozen=True, repr=False)
class ExplainReport(Report):
    """What runs in which precision, why, and what is wrong with it.

    `print(report)` shows the totals, the findings and a table of the operations by source line; a
    notebook shows the same as HTML.

    Attributes:
        name: Of the function.
        policy: As text.
        compute: The compute dtype's short name.
        operations: Every operation, in the order in which they were traced.
        totals: What they add up to.
        findings: What can be changed, and what to type.
        notes: What else is to be known.
        recipe: The policy's recipe for products in 8 or 4 bits, if it has one.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        report = halfstep.explain(lambda w, x: jnp.sum(x @ w), "bf16")(jnp.eye(4), jnp.eye(4))
        print(report)
        assert report.compute == "bf16" and report.findings == ()
        report.check(low=1.0)  # Raises if not all products are in 16 bits.
        ```
    """

    name: str
    policy: str
    compute: str
    operations: tuple[ExplainEntry, ...]
    totals: ExplainTotals
    findings: tuple[ExplainFinding, ...]
    notes: tuple[str, ...]
    recipe: Recipe | None = None

    def __str__(self) -> str:
        parts = [summary(self), *map(str, self.findings), self.table()]
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        return html(self)

    def table(self, *, full: bool = False) -> str:
        """The operations as a table.

        Args:
            full: Every operation on a line of its own. Else those of the same line, primitive and
                dtypes are on one, and what only moves values is left out.
        """
        return table(self.operations, full=full)

    def at(self, place: str) -> tuple[ExplainEntry, ...]:
        """The operations of a source line, `"model.py:41"`, or of a whole file, `"model.py"`."""
        file, colon, line = place.rpartition(":")
        if not colon:
            file, line = place, ""
        return tuple(
            entry
            for entry in self.operations
            if os.path.normpath(f"/{entry.source.file}").endswith(os.path.normpath(f"/{file}"))
            and line in ("", str(entry.source.line))
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "name": self.name,
            "policy": self.policy,
            "compute": self.compute,
            "totals": self.totals.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            "operations": [entry.to_dict() for entry in self.operations],
            "notes": list(self.notes),
        }

    def check(
        self,
        *,
        low: float | int = 0.99,
        max_findings: int = 0,
        f8: float | int | None = None,
    ) -> None:
        """Raise unless the function is as it should be; for tests and CI.

        Args:
            low: The share of the contractions' FLOPs that has to be at the compute dtype, or in
                fewer bits.
            max_findings: How many findings there may be.
            f8: The share of the eligible contractions' FLOPs that has to be multiplied in 8 bits
                (4 with a recipe of 4). Eligible are all that the policy's recipe is for, and that
                nothing in the policy speaks against: see `ExplainF8`.

        Raises:
            LintError: With what misses: the contractions that are not lowered, or not in 8 bits,
                and every finding, each with its line.
        """
        found = misses(self, low=low, max_findings=max_findings, f8=f8)
        if found:
            # Says: required: <share> of the contractions' FLOPs in <dtype>; has <share>. Fix <line>
            raise LintError(found)
