"""Show what fills the peak as a table of the largest groups, as HTML, JSON and a picture."""

import dataclasses
import html as escaping
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from halfstep._base import ABSENT, Report, aligned, figure_of, html_table, percent, size
from halfstep._preflight.hlo.buffer_roles import COLLECTIVES, GRADIENTS, RESIDUALS, TEMPORARIES
from halfstep._preflight.report.peak import CODE, CONSTANTS, OUTPUTS, Peak, PeakBuffer
from halfstep._preflight.report.preflight_entry import PreflightEntry
from halfstep._preflight.report.roles import BATCH, OPTIMIZER, OTHER, PARAMETERS

_LARGEST = 10
_HEADINGS = ("bytes", "of peak", "role", "what", "scope", "line")
_NUMBERS = (True, True, False, False, False, False)
# Color-blind readers can also tell these colors apart (Okabe and Ito's palette).
_COLORS: Mapping[str, str] = MappingProxyType(
    {
        PARAMETERS: "#0072B2",
        OPTIMIZER: "#56B4E9",
        BATCH: "#009E73",
        OTHER: "#999999",
        OUTPUTS: "#CC79A7",
        CODE: "#F0E442",
        CONSTANTS: "#dddddd",
        RESIDUALS: "#D55E00",
        GRADIENTS: "#7F3C8D",
        COLLECTIVES: "#000000",
        TEMPORARIES: "#E69F00",
    }
)


@dataclasses.dataclass(frozen=True)
class _Group:
    """Buffers of one role, scope and line; all arguments of one role."""

    bytes: int
    role: str
    what: str
    scope: str
    source: str


@dataclasses.dataclass(frozen=True, repr=False)
class PeakReport(Report):
    """The memory at the peak of every step and target of a report.

    `print(report.peak)` shows the ten largest groups of each; `report["h100"].peak` has all.

    Attributes:
        entries: The entries of the report.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def double(x):
            return 2 * x


        x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        report = halfstep.preflight(double, (x,), targets="h100")
        print(report.peak)
        ```
    """

    entries: tuple[PreflightEntry, ...]

    def __str__(self) -> str:
        return "\n\n".join(_text(entry) for entry in self.entries)

    def _repr_html_(self) -> str:
        parts = "".join(_html(entry) for entry in self.entries)
        # If the table is wider than the window, the table scrolls and the page does not.
        return f'<div style="overflow-x:auto">{parts}</div>'

    def to_dict(self) -> dict[str, Any]:
        """Return every entry's buffers as plain values, with the bytes by role, scope and line."""
        return {"entries": [_plain(entry) for entry in self.entries]}

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the largest groups of each entry as bars, into a PNG (or PDF, SVG) file.

        Needs matplotlib, which `pip install "halfstep[plot]"` installs.
        """
        drawn = [(entry, entry.peak) for entry in self.entries if entry.peak is not None]
        figure = figure_of("a report")
        figure.set_size_inches(10, 1.2 + 3.2 * max(1, len(drawn)))
        panels = figure.subplots(max(1, len(drawn)), 1, squeeze=False)[:, 0]
        for axes, (entry, peak) in zip(panels, drawn, strict=False):
            _draw(axes, entry, peak)
        figure.savefig(path, dpi=150)


def largest(peak: Peak) -> str:
    """Describe the largest group that is not an argument, on one line; empty if none is left."""
    for group in _groups(peak):
        if group.role in (RESIDUALS, GRADIENTS, TEMPORARIES, COLLECTIVES):
            where = group.source or group.scope
            place = f" of {where}" if where else ""
            return f"{group.role}{place}, {group.what}: {size(group.bytes)}"
    return ""


def _groups(peak: Peak) -> list[_Group]:
    found: dict[tuple[str, str, str], list[PeakBuffer]] = {}
    for buffer in peak.buffers:
        found.setdefault((buffer.role, buffer.scope, buffer.source), []).append(buffer)
    groups = [
        _Group(sum(one.bytes for one in members), role, _what(members), scope, source)
        for (role, scope, source), members in found.items()
    ]
    return sorted(groups, key=lambda group: -group.bytes)


def _what(buffers: Sequence[PeakBuffer]) -> str:
    """Describe the largest array of a group, and count the others."""
    first, others = buffers[0], sum(one.count for one in buffers[1:])
    if not first.array:
        return ABSENT
    times = f"{first.count} x " if first.count > 1 else ""
    return f"{times}{first.array}" + (f" and {others} more" if others else "")


def _rows(peak: Peak) -> list[list[str]]:
    groups = _groups(peak)
    shown, others = groups[:_LARGEST], groups[_LARGEST:]
    rows = [
        [
            size(group.bytes),
            percent(group.bytes / peak.bytes),
            group.role,
            group.what,
            group.scope or ABSENT,
            group.source or ABSENT,
        ]
        for group in shown
    ]
    if others:
        left = sum(group.bytes for group in others)
        share = percent(left / peak.bytes)
        rows.append([size(left), share, f"{len(others)} more groups", "", "", ""])
    return rows


def _lines(peak: Peak) -> Iterator[str]:
    by_role = ", ".join(
        f"{role} {percent(count / peak.bytes)}" for role, count in peak.by("role").items() if count
    )
    yield f"By role: {by_role}."
    reasons = ", ".join(f"{size(count)} {why}" for why, count in peak.unattributed.items())
    rest = f"; the rest: {reasons}" if reasons else ""
    yield f"Attributed: {percent(peak.attributed)} of the peak{rest}."


def _title(entry: PreflightEntry) -> str:
    peak = entry.peak
    if peak is None:
        return (
            f"{entry.variant} on {entry.target}: the compiler has not said what fills the peak, or "
            "the report was saved by a halfstep that did not ask."
        )
    at = f", in {peak.at}" if peak.at else ""
    return f"What fills the peak of {entry.variant} on {entry.target}, {size(peak.bytes)}{at}:"


def _text(entry: PreflightEntry) -> str:
    if entry.peak is None:
        return _title(entry)
    table = aligned([list(_HEADINGS), *_rows(entry.peak)], list(_NUMBERS))
    return "\n".join([_title(entry), "", table, "", *_lines(entry.peak)])


def _html(entry: PreflightEntry) -> str:
    title = f"<p>{escaping.escape(_title(entry))}</p>"
    if entry.peak is None:
        return title
    rows = [list(zip(row, _NUMBERS, strict=True)) for row in _rows(entry.peak)]
    head = list(zip(_HEADINGS, _NUMBERS, strict=True))
    lines = "<br>".join(escaping.escape(line) for line in _lines(entry.peak))
    return f"{title}{html_table(head, rows, [True] * len(rows))}<p>{lines}</p>"


def _plain(entry: PreflightEntry) -> dict[str, Any]:
    made: dict[str, Any] = {"target": entry.target, "variant": entry.variant, "peak": None}
    if entry.peak is not None:
        peak = entry.peak
        made["peak"] = dataclasses.asdict(peak) | {
            "attributed": peak.attributed,
            "by_role": peak.by("role"),
            "by_scope": peak.by("scope"),
            "by_source": peak.by("source"),
        }
    return made


def _draw(axes: Any, entry: PreflightEntry, peak: Peak) -> None:
    groups = _groups(peak)[:_LARGEST]
    unit, scale = ("GiB", 2**30) if peak.bytes >= 2**30 else ("MiB", 2**20)
    seen: set[str] = set()
    for row, group in enumerate(groups):
        label = None if group.role in seen else group.role
        seen.add(group.role)
        width = group.bytes / scale
        axes.barh(row, width, color=_COLORS.get(group.role, "#999999"), label=label, height=0.7)
        axes.text(
            width,
            row,
            f" {size(group.bytes)}, {percent(group.bytes / peak.bytes)}",
            va="center",
            fontsize=8,
        )
    names = [
        "  ".join(part for part in (group.what, group.scope, group.source) if part)
        for group in groups
    ]
    axes.set_yticks(range(len(groups)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max((group.bytes for group in groups), default=1) / scale)
    axes.set_title(
        f"{entry.target}, {entry.variant}: {size(peak.bytes)} at the peak, "
        f"{percent(peak.attributed)} attributed",
        fontsize=10,
        loc="left",
    )
    axes.set_xlabel(f"{unit} of one device (compiled, not run)", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
