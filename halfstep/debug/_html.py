"""A report of a log for notebooks."""

import html as escaping
from typing import TYPE_CHECKING

from halfstep._tables import html_table
from halfstep.debug._text import caption, cells, headline, heads

if TYPE_CHECKING:
    from halfstep.debug._report import DebugReport


def html(report: "DebugReport") -> str:
    """The same as the text; the first bad site is red."""
    parts = [f"<p>{escaping.escape(headline(report))}</p>"]
    if report.found is not None:
        first, *rest = str(report.found).splitlines()
        lines = "<br>".join(escaping.escape(line.strip()) for line in rest)
        parts.append(f'<p><b style="color:#d32f2f">{escaping.escape(first)}</b><br>{lines}</p>')
    if report.step is not None:
        parts.append(f"<p>{escaping.escape(caption(report))}</p>")
    if report.shown:
        head = heads(report)
        rows = [
            [(cell, number) for cell, (_, number) in zip(cells(report, trace), head, strict=True)]
            for trace in report.shown
        ]
        good = [trace.site != getattr(report.found, "site", None) for trace in report.shown]
        parts.append(html_table(head, rows, good))
    # Wider than a narrow window: it scrolls, and the page does not.
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'
