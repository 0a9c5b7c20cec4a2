"""A comparison as text and for notebooks."""

import html as escaping
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfstep._tables import ABSENT, aligned, html_table

if TYPE_CHECKING:
    from halfstep.debug._comparison import Comparison, Deviation

# How many sites and gradients are shown.
_SHOWN = 10
_SITES = (
    ("site", False),
    ("scope", False),
    ("held in", False),
    ("error", True),
    ("of its inputs", True),
    ("cosine", True),
)
_GRADIENTS = (("gradient of", False), ("error", True), ("cosine", True))


def share(value: float) -> str:
    """An error for people: `0.57 %`."""
    if value == float("inf"):
        return "not finite"
    return f"{100 * value:.0f} %" if value >= 1 else f"{100 * value:.2g} %"


def headline(report: "Comparison") -> str:
    """How far off everything is."""
    parts = [f"results are off by {share(report.results.error)}"]
    if report.gradients:
        gradient = report.gradient
        parts.append(f"gradients by {share(gradient.error)} (cosine {_cosine(gradient.cosine)})")
    return f"{report.policy} beside float32, {len(report.sites)} sites: {', '.join(parts)}"


def tables(report: "Comparison") -> list[tuple[str, Sequence[tuple[str, bool]], list[list[str]]]]:
    """Captions, headings and rows."""
    made = []
    if report.worst:
        rows = [_site(site) for site in report.worst[:_SHOWN]]
        made.append(("Where error is added, most first:", _SITES, rows))
    if report.gradients:
        order = sorted(report.gradients, key=lambda one: -one.error)[:_SHOWN]
        rows = [[one.path, share(one.error), _cosine(one.cosine)] for one in order]
        made.append(("Gradients, the worst first:", _GRADIENTS, rows))
    return made


def text(report: "Comparison") -> str:
    """All of it."""
    parts = [headline(report)]
    for caption, head, rows in tables(report):
        lines = [[name for name, _ in head], *rows]
        parts.append(f"{caption}\n{aligned(lines, [number for _, number in head])}")
    return "\n\n".join(parts)


def html(report: "Comparison") -> str:
    """The same; what is not finite is red."""
    parts = [f"<p>{escaping.escape(headline(report))}</p>"]
    for caption, head, rows in tables(report):
        numbers = [number for _, number in head]
        cells = [list(zip(row, numbers, strict=True)) for row in rows]
        good = ["not finite" not in row for row in rows]
        parts += [f"<p>{caption}</p>", html_table(head, cells, good)]
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def _site(one: "Deviation") -> list[str]:
    site = one.site
    name = site.path or f"{site.source.short} {site.op}"
    turn = ""
    if one.turn is not None:
        turn = f", most in turn {one.turn} of {len(one.turns)}"
    return [
        f"{name}{turn}",
        site.scope or ABSENT,
        one.dtype,
        share(one.there),
        share(one.before),
        _cosine(one.cosine),
    ]


def _cosine(value: float) -> str:
    return f"{value:.5f}"
