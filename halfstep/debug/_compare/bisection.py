"""Report a bisection: the rules that are needed, and the policy with these rules."""

import dataclasses
import html as escaping
import os
from typing import Any

from halfstep._base import Report, aligned, html_table
from halfstep._policy import Policy, PrecisionRule
from halfstep._version import __version__
from halfstep.debug._compare.comparison_report import share

_HEAD = (("rule", False), ("lines", False))
# At most this many lines are named.
_LINES = 4


@dataclasses.dataclass(frozen=True)
class Needed:
    """A rule that is needed, and the lines that it matches.

    Attributes:
        rule: The rule.
        lines: The lines of your code with operations that the rule matches: `"model.py:41"`.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def loss(w, x):
            return jnp.log(jnp.mean((1000 * x * w) ** 2))


        batch = jnp.ones(2), jnp.ones(2)
        found = halfstep.debug.bisect(loss, [batch], "f16,op:*=compute", progress=False)
        one = found.needed[0]
        assert str(one.rule) in str(found.policy)
        assert all(line.endswith(":6") for line in one.lines)
        ```
    """

    rule: PrecisionRule
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Bisection(Report):
    """The parts that must stay wide, and the policy that keeps them wide.

    Attributes:
        policy: The policy that was given, with the rules that are needed.
        needed: The rules that are needed, with the lines that they match.
        tolerance: The error that was allowed.
        before: The error of the policy that was given.
        error: The error of the policy that was found.
        operations: How many operations run in low precision in the policy that was given.
        wide: How many of these operations the rules match.
        candidates: How many scopes and operations the search started with.
        compiles: How many programs were compiled.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def loss(w, x):
            return jnp.log(jnp.mean((1000 * x * w) ** 2))


        batch = jnp.ones(2), jnp.ones(2)
        found = halfstep.debug.bisect(loss, [batch], "f16,op:*=compute", progress=False)
        assert found.before == float("inf") and found.error <= found.tolerance
        assert 0 < found.wide < found.operations
        ```
    """

    policy: Policy
    needed: tuple[Needed, ...]
    tolerance: float
    before: float
    error: float
    operations: int
    wide: int
    candidates: int
    compiles: int

    @property
    def rules(self) -> tuple[PrecisionRule, ...]:
        """The rules that are needed."""
        return tuple(one.rule for one in self.needed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy, with the findings as comments, into a file that `Policy.load` reads."""
        notes = [f"Found by halfstep {__version__}, debug.bisect: {self._headline}."]
        notes += [f"{one.rule}: {_listed(one.lines)}" for one in self.needed]
        self.policy.save(path, notes=notes)

    def __str__(self) -> str:
        parts = [f"{self._headline}, {self.compiles} compiles"]
        if self.needed:
            rows = [[name for name, _ in _HEAD], *self._rows]
            parts.append(aligned(rows, [False] * len(_HEAD)))
            parts.append(f"policy: {self.policy}")
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        parts = [f"<p>{escaping.escape(self._headline)}, {self.compiles} compiles</p>"]
        if self.needed:
            rows = [[(cell, False) for cell in row] for row in self._rows]
            parts.append(html_table(_HEAD, rows, [True] * len(rows)))
            parts.append(f"<p>policy: <code>{escaping.escape(str(self.policy))}</code></p>")
        return f'<div style="overflow-x:auto">{"".join(parts)}</div>'

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "policy": str(self.policy),
            "needed": [{"rule": str(one.rule), "lines": list(one.lines)} for one in self.needed],
            "tolerance": self.tolerance,
            "before": self.before,
            "error": self.error,
            "operations": self.operations,
            "wide": self.wide,
            "candidates": self.candidates,
            "compiles": self.compiles,
        }

    @property
    def _headline(self) -> str:
        allowed = f"(allowed: {share(self.tolerance)})"
        if not self.needed:
            return f"nothing is needed: the error is {share(self.error)} {allowed}"
        must = f"{self.wide} of {self.operations} operations must stay in {self.rules[0].outcome}"
        return f"{must}: error {share(self.before)} -> {share(self.error)} {allowed}"

    @property
    def _rows(self) -> list[list[str]]:
        return [[str(one.rule), _listed(one.lines)] for one in self.needed]


def _listed(lines: tuple[str, ...]) -> str:
    more = f" and {len(lines) - _LINES} more" if len(lines) > _LINES else ""
    return ", ".join(lines[:_LINES]) + more
