"""Define the report of `explain`: its text and HTML, its table of operations, and `check`."""

import dataclasses
import html as escaping
import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from halfstep._base import (
    ABSENT,
    Report,
    aligned,
    check_share,
    checked,
    flops,
    html_table,
    number_of,
    percent,
    shortened,
    size,
)
from halfstep._explain.carry_rows import ExplainCarry
from halfstep._explain.entries import ExplainEntry
from halfstep._explain.findings import ExplainFinding
from halfstep._explain.residual_rows import ExplainResidual
from halfstep._explain.totals import (
    ExplainF8,
    ExplainTotals,
    f8_fix,
    is_f8_eligible,
    is_low,
    why_not_f8,
)
from halfstep._policy import Recipe
from halfstep._program import Source

# How many source lines are named for contractions that are not in 8 or 4 bits.
_LINES = 4
# A table that is wider or longer than the window scrolls, and the page does not.
_SCROLL = "overflow:auto;max-height:32em"
_HEADINGS = (
    ("  operation", False),
    ("dtypes", False),
    ("rule", False),
    ("why", False),
    ("runs", True),
    ("FLOPs", True),
    ("out", True),
)
"""The headings of the columns, and whether the columns hold numbers."""
_ISLAND = "* in a float32 island, which is recomputed for the gradient and not stored."
_WIDEST = MappingProxyType({"  operation": 24, "dtypes": 20, "why": 40})


class LintError(AssertionError):
    """Raised when a function misses a requirement; the message lists every miss with its line.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def product(w, x):
            with halfstep.keep_precision():
                return x @ w


        report = halfstep.explain(product, "bf16")(jnp.eye(4), jnp.eye(4))
        try:
            report.check(low=1.0)
        except halfstep.LintError as error:
            assert "required" in str(error)
        ```
    """


@dataclasses.dataclass(frozen=True, repr=False)
class ExplainReport(Report):
    """A report of what runs in which precision, why, and what is wrong with it.

    `print(report)` shows the totals, the findings and a table of the operations by source line; a
    notebook shows the same as HTML.

    Attributes:
        name: The name of the function.
        policy: The policy as a string.
        compute: The compute dtype's short name.
        operations: Every operation, in the order in which they were traced.
        totals: What the operations add up to.
        findings: What can be changed, and what to type.
        notes: What else to know.
        recipe: The policy's recipe for products in 8 or 4 bits, if it has one.
        residuals: Every value that is kept for the backward pass, the largest first, and those that
            rules recompute.
        carries: Every floating-point carry of a loop: its dtype, and why.

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
    residuals: tuple[ExplainResidual, ...] = ()
    carries: tuple[ExplainCarry, ...] = ()

    def __str__(self) -> str:
        parts = [_summary(self), *map(str, self.findings), self.table()]
        if self.carries:
            parts.append(self.carry_table())
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        return _html(self)

    @checked
    def table(self, *, full: bool = False) -> str:
        """Return the operations as a table.

        Args:
            full: Whether every operation gets a row of its own. Otherwise operations of the same
                source line, primitive and dtypes share a row, and those that only move values are
                left out.
        """
        return _table(self.operations, full=full)

    def residual_table(self) -> str:
        """Return what is kept for the backward pass, and what rules recompute, as a table."""
        head = ["bytes", "decision", "type", "operation", "source", "scope", "rule"]
        cells = [
            [size(r.bytes), r.decision, str(r.type), r.operation, r.source.short, r.scope, r.by]
            for r in self.residuals
        ]
        return aligned([head, *cells], [True, *[False] * 6])

    def carry_table(self) -> str:
        """Return what the loops carry as a table."""
        head, *rows = _carries(self.carries)
        return aligned([head, *rows], [False] * len(head))

    def at(self, place: str) -> tuple[ExplainEntry, ...]:
        """Return the operations of a source line, `"model.py:41"`, or of a file, `"model.py"`."""
        # Both paths get a slash in front, so that `model.py` does not stand for `my_model.py`.
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
        """Return everything as plain values."""
        return {
            "name": self.name,
            "policy": self.policy,
            "compute": self.compute,
            "totals": self.totals.to_dict(),
            "findings": [finding.to_dict() for finding in self.findings],
            "operations": [entry.to_dict() for entry in self.operations],
            "notes": list(self.notes),
            "residuals": [residual.to_dict() for residual in self.residuals],
            "carries": [carry.to_dict() for carry in self.carries],
        }

    @checked
    def check(
        self,
        *,
        low: float | int = 0.99,
        max_findings: int = 0,
        f8: float | int | None = None,
    ) -> None:
        """Raise unless the function meets the requirements; for tests and CI.

        Args:
            low: The share of the contractions' FLOPs that has to be in the compute dtype, or in
                fewer bits.
            max_findings: How many findings there may be.
            f8: The share of the eligible contractions' FLOPs that has to be multiplied in 8 bits
                (4 with a recipe of 4). A contraction is eligible if the policy's recipe is for it,
                and nothing in the policy excludes it: see `ExplainF8`.

        Raises:
            LintError: If a requirement is missed. The message lists the contractions that are not
                lowered, or not in 8 bits, and every finding, each with its line.
        """
        check_share("low", low)
        check_share("f8", 0 if f8 is None else f8)
        if max_findings < 0:
            raise ValueError(
                f"`max_findings` must be how many findings there may be, 0 or more; got "
                f"{max_findings}."
            )
        found = _misses(self, low=low, max_findings=max_findings, f8=f8)
        if found:
            raise LintError(found)


def _carries(carries: Sequence[ExplainCarry]) -> list[list[str]]:
    """Return a heading and a row for each carry."""
    # A loop's carries are often many arrays that are read in the same way.
    head = ["carry", "type", "read as", "because", "loop", "to change it"]
    return [
        head,
        *(
            [c.name, str(c.type), c.reading, c.reason, f"{c.loop} of {c.source.short}", c.rule]
            for c in carries
        ),
    ]


def _summary(report: ExplainReport) -> str:
    """Return the totals, one per line."""
    return aligned([list(pair) for pair in _figures(report)], [False, False])


def _figures(report: ExplainReport) -> list[tuple[str, str]]:
    """Return the totals with their names."""
    totals = report.totals
    total = sum(totals.contraction_flops.values())
    shares = [
        f"{name} {percent(count / total)}" for name, count in totals.contraction_flops.items()
    ]
    pairs = [
        (report.name, f"policy {report.policy}, {number_of(len(report.operations), 'operation')}"),
        ("contractions", f"{flops(total)}: {', '.join(shares)}" if total else "none"),
        *_few_bits(report),
        (
            "float32 islands",
            f"{totals.islands}, {flops(totals.again_flops)} recomputed for the gradient",
        ),
        ("casts", f"{totals.casts} added"),
    ]
    if totals.stored is not None:
        pairs.append(("stored for backward", _stored(totals.stored)))
        pairs.append(("  casts of arguments", _stored(totals.stored_casts or {})))
        pairs.append(("  as it is written", _stored(totals.stored_float32 or {})))
    pairs += [("note", note) for note in report.notes]
    pairs.append(("findings", str(len(report.findings)) if report.findings else "none"))
    return pairs


def _few_bits(report: ExplainReport) -> list[tuple[str, str]]:
    """Return how many contractions are in 8 or 4 bits, and why the others are not."""
    f8 = report.totals.f8
    if f8 is None:
        return []
    count = f"{f8.count} of {number_of(f8.total, 'contraction')} ({percent(f8.flops)} of the FLOPs)"
    pairs = [(f"  in {f8.format}", f"{count}; {percent(f8.eligible)} of what {_told(f8)} for")]
    for other in f8.others:
        mark = "missed" if other.eligible else "not for it"
        named = [*other.sources[:_LINES], *(["..."] if len(other.sources) > _LINES else [])]
        pairs.append((f"  {mark}", f"{other.count}: {other.reason}: {', '.join(named)}"))
    return pairs


def _told(f8: ExplainF8) -> str:
    return f"{f8.recipe} {'are' if ' and ' in f8.recipe else 'is'}"


def _stored(found: Mapping[str, int]) -> str:
    """Return bytes by dtype, and their sum."""
    if not found:
        return "nothing"
    parts = [f"{name} {size(count)}" for name, count in found.items()]
    return parts[0] if len(parts) == 1 else f"{size(sum(found.values()))}: {', '.join(parts)}"


def _misses(
    report: ExplainReport, *, low: float | int, max_findings: int, f8: float | int | None = None
) -> str:
    """Return what misses the requirements; empty if nothing does."""
    lines: list[str] = []
    if report.totals.low < low:
        lines.append(
            f"required: {percent(low)} of the contractions' FLOPs in {report.compute}; "
            f"{report.name} has {percent(report.totals.low)}:"
        )
        others = [
            entry
            for entry in report.operations
            if entry.is_contraction and not is_low(entry, report.compute)
        ]
        lines += [
            f"  {source}: {' '.join(row[:2])}: {row[3]}"
            for source, row in _rows(others, full=False)
        ]
    if f8 is not None:
        lines += _f8_misses(report, f8)
    if len(report.findings) > max_findings:
        most = (
            "no findings" if not max_findings else f"at most {number_of(max_findings, 'finding')}"
        )
        lines.append(f"required: {most}; {report.name} has {len(report.findings)}:")
        lines += [str(finding) for finding in report.findings]
    return "\n".join(lines)


def _f8_misses(report: ExplainReport, share: float | int) -> list[str]:
    """Return the contractions that are not in 8 or 4 bits, though the recipe is for them."""
    found, recipe = report.totals.f8, report.recipe
    if found is None or recipe is None:
        return [
            f"required: {percent(share)} of the eligible contractions' FLOPs in fp8; the policy "
            f'{report.policy} has no recipe: write policy="f8", say.'
        ]
    if found.eligible >= share:
        return []
    lines = [
        f"required: {percent(share)} of the eligible contractions' FLOPs in {found.format}; "
        f"{report.name} has {percent(found.eligible)}:"
    ]
    missed = [
        entry
        for entry in report.operations
        if entry.is_contraction and not entry.in_f8 and is_f8_eligible(entry)
    ]
    for entry in dict.fromkeys(missed):
        name = f" by {entry.parameter}" if entry.parameter else ""
        scope = f" in {entry.scope}" if entry.scope else ""
        shapes = " x ".join(map(str, entry.ins[:2]))
        lines.append(f"  {entry.source}: {entry.name} {shapes}{name}{scope}: {why_not_f8(entry)}")
        lines.append(f"    Fix: {f8_fix(entry, recipe)}")
    return lines


def _html(report: ExplainReport) -> str:
    """Return the same as the text, with colors of its own only for findings."""
    totals = [[(name, False), (text, False)] for name, text in _figures(report)[1:]]
    first = _figures(report)[0]
    parts = [html_table([(first[0], False), (first[1], False)], totals, [True] * len(totals))]
    if report.findings:
        parts.append(f"<ol>{''.join(map(_finding, report.findings))}</ol>")
    shown = _rows(report.operations, full=False)
    head = [("source", False), *_HEADINGS]
    cells = [
        [(cell, number) for cell, (_, number) in zip((source, *row), head, strict=True)]
        for source, row in shown
    ]
    parts.append(f'<div style="{_SCROLL}">{html_table(head, cells, [True] * len(cells))}</div>')
    if report.carries:
        head, *rows = ([(cell, False) for cell in row] for row in _carries(report.carries))
        parts.append(f'<div style="{_SCROLL}">{html_table(head, rows, [True] * len(rows))}</div>')
    notes = [_ISLAND]
    moved = _left_out(report.operations)
    if moved:
        notes.append(f"{moved:,} operations without arithmetic in floating point left out.")
    parts.append("<p>" + "<br>".join(map(escaping.escape, notes)) + "</p>")
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def _marked(text: str) -> str:
    """Return text as HTML, with code as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escaping.escape(text))


def _finding(finding: ExplainFinding) -> str:
    line = escaping.escape(f"{finding.source}: {finding.kind}")
    what = _marked(f"{finding.what} ({size(finding.bytes)})")
    rest = "<br>".join(map(_marked, (finding.why, f"Fix: {finding.fix}")))
    line = f'<b style="color:#d32f2f">{line}</b>'
    return f'<li style="margin-bottom:0.6em">{line}: {what}<br>{rest}</li>'


def _table(entries: Sequence[ExplainEntry], *, full: bool) -> str:
    """Return the table of operations, all of them or by line."""
    made = _rows(entries, full=full)
    shown = [
        [
            shortened(cell, len(cell) if full else _WIDEST.get(heading, len(cell)))
            for cell, (heading, _) in zip(("  " + row[0], *row[1:]), _HEADINGS, strict=True)
        ]
        for _, row in made
    ]
    head = [heading for heading, _ in _HEADINGS]
    numbers = [number for _, number in _HEADINGS]
    # One line for each row, because the sources go between them.
    text, *lines = aligned([head, *shown], numbers, split=False).split("\n")
    # Each source line is a heading above its operations.
    above = ""
    for (source, _), line in zip(made, lines, strict=True):
        text += f"\n{line}" if source == above else f"\n{source}\n{line}"
        above = source
    if any(entry.island is not None for entry in entries):
        text += f"\n{_ISLAND}"
    moved = _left_out(entries)
    if full or not moved:
        return text
    return (
        f"{text}\n{number_of(moved, 'operation')} without arithmetic in floating point left out; "
        "table(full=True) shows all."
    )


def _left_out(entries: Sequence[ExplainEntry]) -> int:
    """Return how many operations the short table leaves out."""
    return sum(not _computes(entry) for entry in entries)


def _rows(entries: Sequence[ExplainEntry], *, full: bool) -> list[tuple[str, list[str]]]:
    """Return the cells of the table, each row with its source line."""
    # A line of a model is often a dozen operations, and a loop over layers repeats them. The short
    # table has one row for operations that differ in nothing that is shown.
    by_source: dict[Source, dict[object, list[ExplainEntry]]] = {}
    for number, entry in enumerate(entries):
        if full or _computes(entry):
            same = (entry.name, entry.dtypes, entry.rule, entry.by)
            groups = by_source.setdefault(entry.source, {})
            groups.setdefault(number if full else same, []).append(entry)
    return [
        (str(source), _row(group, full=full))
        for source, groups in by_source.items()
        for group in groups.values()
    ]


def _row(group: Sequence[ExplainEntry], *, full: bool) -> list[str]:
    first = group[0]
    count = sum(entry.count for entry in group)
    total = sum(entry.count * entry.flops for entry in group)
    out = sum(entry.count * entry.bytes_out for entry in group)
    types = first.dtypes
    if full:
        types = f"{', '.join(map(str, first.ins))} -> {', '.join(map(str, first.outs))}"
    island = "" if first.island is None else "*"
    return [
        first.name,
        types,
        f"{first.rule}{island}",
        first.reason,
        str(count),
        flops(total).replace("FLOP", "").strip() if total else ABSENT,
        size(out),
    ]


def _computes(entry: ExplainEntry) -> bool:
    """Return whether an operation is arithmetic on floating-point numbers."""
    floats = {"f32", "f64", "bf16", "f16"}
    return (entry.flops > 0 or entry.rule == "as traced") and any(
        value.dtype in floats for value in entry.outs
    )
