"""A report for notebooks."""

import html as escaping
import re
from typing import TYPE_CHECKING

from halfstep._explain._finding import ExplainFinding
from halfstep._explain._text import HEADINGS, ISLAND, figures, left_out, rows
from halfstep._tables import html_table, size

if TYPE_CHECKING:
    from halfstep._explain._report import ExplainReport

# Wider or longer than the window: it scrolls, and the page does not.
_SCROLL = "overflow:auto;max-height:32em"


def html(report: "ExplainReport") -> str:
    """The same as the text, with colors of its own for nothing but findings."""
    totals = [[(name, False), (text, False)] for name, text in figures(report)[1:]]
    first = figures(report)[0]
    parts = [html_table([(first[0], False), (first[1], False)], totals, [True] * len(totals))]
    if report.findings:
        parts.append(f"<ol>{''.join(map(_finding, report.findings))}</ol>")
    shown = rows(report.operations, full=False)
    head = [("source", False), *HEADINGS]
    cells = [
        [(cell, number) for cell, (_, number) in zip((source, *row), head, strict=True)]
        for source, row in shown
    ]
    parts.append(f'<div style="{_SCROLL}">{html_table(head, cells, [True] * len(cells))}</div>')
    notes = [ISLAND]
    moved = left_out(report.operations)
    if moved:
        notes.append(f"{moved:,} operations without arithmetic in floating point left out.")
    parts.append("<p>" + "<br>".join(map(escaping.escape, notes)) + "</p>")
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def _marked(text: str) -> str:
    """Text for a page, with code as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escaping.escape(text))


def _finding(finding: ExplainFinding) -> str:
    line = escaping.escape(f"{finding.source}: {finding.kind}")
    what = _marked(f"{finding.what} ({size(finding.bytes)})")
    rest = "<br>".join(map(_marked, (finding.why, f"Fix: {finding.fix}")))
    line = f'<b style="color:#d32f2f">{line}</b>'
    return f'<li style="margin-bottom:0.6em">{line}: {what}<br>{rest}</li>'
