"""Report where non-finite values in a log began, and the steps before, as text, HTML and a plot."""

import dataclasses
import html as escaping
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from halfstep._base import ABSENT, Report, aligned, figure_of, html_table, percent
from halfstep.debug._instrument.ancestors import Parents
from halfstep.debug._instrument.layout import Layout
from halfstep.debug._instrument.site import Site
from halfstep.debug._instrument.stats import Column
from halfstep.debug._nonfinite.first_nonfinite import NonFinite, finding
from halfstep.debug._nonfinite.origin import origin

# How many of the sites before the first bad one are shown.
_UPSTREAM = 8
# How many steps fit on a line, and how many sites on a plot.
_STEPS, _SITES = 6, 60
_COLUMNS = ("site", "pass", "scope")
# The red of `html_table`.
_BAD = "#d32f2f"


@dataclasses.dataclass(frozen=True)
class Trace:
    """The numbers of a site in the last steps.

    Attributes:
        site: The site.
        absmax: The largest magnitude in each step; infinite or NaN if an element was.
        smallest: The smallest magnitude that is not zero.
        bad: How many elements were not finite.
        below: The share of elements below the compute dtype's smallest normal number.
        above: The share of elements above the compute dtype's largest number.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        recorder = halfstep.debug.record(lambda x: x * 100, compute="float16")
        x = jnp.ones(2)
        log = recorder.init(x)
        for _ in range(3):
            log, x = jax.jit(recorder)(log, x)
        trace = log.report().sites[-1]
        assert isinstance(trace, halfstep.debug.Trace)
        assert trace.absmax == (1e2, 1e4, 1e6)
        assert trace.above == (0, 0, 1)
        ```
    """

    site: Site
    absmax: tuple[float, ...]
    smallest: tuple[float, ...]
    bad: tuple[int, ...]
    below: tuple[float, ...]
    above: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {**dataclasses.asdict(self), "site": self.site.to_dict()}


def trace_of(site: Site, rows: np.ndarray) -> Trace:
    """Build the trace of a site from its rows, one for each step."""

    def column(which: Column) -> tuple[float, ...]:
        return tuple(float(number) for number in rows[:, which])

    return Trace(
        site,
        column(Column.ABSMAX),
        column(Column.SMALLEST),
        tuple(int(number) for number in rows[:, Column.BAD]),
        column(Column.BELOW),
        column(Column.ABOVE),
    )


@dataclasses.dataclass(frozen=True, repr=False)
class DebugReport(Report):
    """Where non-finite values began, and the steps before.

    `print(report)` shows the first bad site, what to do, and the last steps at this site and at the
    sites before it; a notebook shows the same as HTML.

    Attributes:
        steps: The numbers of the steps that are kept.
        bad_steps: The steps in which anything was not finite.
        step: The step that the report is about; `None` if the log has no steps.
        found: Where non-finite values began in that step; `None` if everything was finite.
        shown: The sites that the report is about: the first bad site and the sites that it is
            computed from, nearest first. If everything is finite, the sites that lose most to the
            range of the compute dtype.
        sites: All sites, in the order of a run.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        recorder = halfstep.debug.record(lambda x: jnp.log(x))
        x = jnp.full(2, 2.0)
        log = recorder.init(x)
        for _ in range(3):
            log, x = jax.jit(recorder)(log, x)
        report = log.report()
        assert isinstance(report, halfstep.debug.DebugReport)
        assert report.steps == (0, 1, 2) and report.bad_steps == (2,)
        assert report.step == 2 and report.found.kind == "nan"
        ```
    """

    steps: tuple[int, ...]
    bad_steps: tuple[int, ...]
    step: int | None
    found: NonFinite | None
    shown: tuple[Trace, ...]
    sites: tuple[Trace, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return _text(self)

    def _repr_html_(self) -> str:
        return _html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "steps": list(self.steps),
            "bad_steps": list(self.bad_steps),
            "step": self.step,
            "found": None if self.found is None else self.found.to_dict(),
            "shown": [trace.to_dict() for trace in self.shown],
            "sites": [trace.to_dict() for trace in self.sites],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw a map of magnitudes over sites and steps into a PNG file.

        Values that are not finite are red. If there are too many sites for a page, the sites shown
        in the report stay, and of the others those that lose most to the compute dtype's range.

        Args:
            path: The file. Needs `halfstep[plot]`.
        """
        bad = None if self.found is None else self.found.site
        draw_map(_drawn(self), self.steps, bad, path)


def report(layout: Layout, rows: np.ndarray, steps: range, step: int | None) -> DebugReport:
    """Build the report from the rows of some steps.

    Args:
        layout: The layout of the program.
        rows: `[steps, sites, columns]`.
        steps: The numbers of the steps.
        step: The step to report; `None` for the first bad step, or else the last step.
    """
    if step is not None and step not in steps:
        kept = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise ValueError(f"step {step} is not in the log, which has: {kept}")
    bad = [steps[at] for at, row in enumerate(rows) if (row[:, Column.BAD] > 0).any()]
    if step is None and steps:
        step = bad[0] if bad else steps[-1]
    traces = tuple(trace_of(site, rows[:, number]) for number, site in enumerate(layout.sites))
    found, shown = None, []
    if step is not None:
        at = rows[steps.index(step)]
        began = origin(layout, at)
        if began is None:
            shown = _nearest(at)
        else:
            found = finding(layout, at, began)
            shown = _upstream(layout, began.row)
    return DebugReport(
        tuple(steps), tuple(bad), step, found, tuple(traces[number] for number in shown), traces
    )


def _upstream(layout: Layout, row: int) -> list[int]:
    """Return a site and the sites that it is computed from, nearest first."""
    parents = Parents(layout)
    found, at = [row], 0
    while at < len(found) and len(found) <= _UPSTREAM:
        # Iteration 0 leads to values from outside the loop. Later iterations would list the same
        # lines of the loop once more.
        turns = (0.0,) * len(layout.sites[found[at]].loops)
        for value, _ in parents.of_site(found[at], turns):
            if isinstance(value, int) and value not in found:
                found.append(value)
        at += 1
    return found[: _UPSTREAM + 1]


def _nearest(rows: np.ndarray) -> list[int]:
    """Return the sites that lose most of their numbers to the compute dtype's range."""
    lost = rows[:, Column.BELOW] + rows[:, Column.ABOVE]
    order = np.argsort(-lost, kind="stable")
    return [int(number) for number in order[: _UPSTREAM + 1] if lost[number] > 0]


def _drawn(report: DebugReport) -> list[Trace]:
    """Return the sites to draw, in the order of a run."""
    if len(report.sites) <= _SITES:
        return list(report.sites)
    # By identity: a trace with a NaN in it is equal to nothing.
    shown = {id(trace) for trace in report.shown}

    def urgency(trace: Trace) -> tuple[bool, bool, float]:
        lost = max((*trace.below, *trace.above), default=0.0)
        return id(trace) in shown, any(trace.bad), lost

    order = sorted(range(len(report.sites)), key=lambda n: urgency(report.sites[n]), reverse=True)
    return [report.sites[number] for number in sorted(order[:_SITES])]


def _headline(report: DebugReport) -> str:
    """Say whether anything is wrong, and since when."""
    if report.step is None:
        return "nothing is recorded yet"
    kept = f"steps {report.steps[0]} to {report.steps[-1]}"
    if report.found is None:
        return f"{kept}: all finite in step {report.step}, {len(report.sites)} sites"
    later = [step for step in report.bad_steps if step != report.step]
    others = f"; also in step{'s' * (len(later) > 1)} {_listed(later)}" if later else ""
    return f"{kept}: not finite in step {report.step}{others}; {len(report.sites)} sites"


def _shown_steps(report: DebugReport) -> list[int]:
    """Return the positions of the steps in the table: the last ones up to the reported step."""
    if report.step is None:
        return []
    # The steps before the bad one show what led to it; later ones only repeat it.
    end = report.steps.index(report.step) + 1
    return list(range(max(0, end - _STEPS), end))


def _heads(report: DebugReport) -> list[tuple[str, bool]]:
    """Return the headings of the table, and whether each is for numbers."""
    steps = [(f"step {report.steps[at]}", True) for at in _shown_steps(report)]
    words = [(name, False) for name in _COLUMNS]
    return [*words, *steps, ("below", True), ("above", True)]


def _cells(report: DebugReport, trace: Trace) -> list[str]:
    """Return a line of the table: magnitudes step by step, and the shares of the last step."""
    at = _shown_steps(report)
    site = trace.site
    name = site.path or f"{site.source.short} {site.op} {site.type}"
    return [
        name,
        site.pass_name,
        site.scope or ABSENT,
        *(_magnitude(trace.absmax[position]) for position in at),
        percent(trace.below[at[-1]]),
        percent(trace.above[at[-1]]),
    ]


def _caption(report: DebugReport) -> str:
    """Say what the table shows."""
    if report.found is not None:
        return "Largest magnitudes there and of what it is made of, step by step:"
    if report.shown:
        return "Nearest to what the compute dtype can hold, largest magnitudes step by step:"
    return "No number is below or above what the compute dtype can hold."


def _text(report: DebugReport) -> str:
    """Return the whole report as text."""
    parts = [_headline(report)]
    if report.found is not None:
        parts.append(str(report.found))
    if report.step is not None:
        parts.append(_caption(report))
    if report.shown:
        heading = _heads(report)
        rows = [[name for name, _ in heading], *(_cells(report, t) for t in report.shown)]
        parts[-1] += "\n" + aligned(rows, [is_number for _, is_number in heading])
    return "\n\n".join(parts)


def _listed(steps: list[int]) -> str:
    first = ", ".join(map(str, steps[:8]))
    return f"{first} and {len(steps) - 8} more" if len(steps) > 8 else first


def _html(report: DebugReport) -> str:
    """Return the whole report as HTML; the first bad site is red."""
    parts = [f"<p>{escaping.escape(_headline(report))}</p>"]
    if report.found is not None:
        first, *rest = str(report.found).splitlines()
        lines = "<br>".join(escaping.escape(line.strip()) for line in rest)
        parts.append(f'<p><b style="color:#d32f2f">{escaping.escape(first)}</b><br>{lines}</p>')
    if report.step is not None:
        parts.append(f"<p>{escaping.escape(_caption(report))}</p>")
    if report.shown:
        head = _heads(report)
        rows = [
            [(cell, number) for cell, (_, number) in zip(_cells(report, trace), head, strict=True)]
            for trace in report.shown
        ]
        good = [trace.site != getattr(report.found, "site", None) for trace in report.shown]
        parts.append(html_table(head, rows, good))
    # In a narrow window, the table scrolls and the page does not.
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def _magnitude(value: float) -> str:
    """Format a magnitude; a value that was not computed has none."""
    return ABSENT if value == -1 else f"{value:.3g}"


def draw_map(
    traces: Sequence[Trace],
    steps: Sequence[int],
    bad_site: Site | None,
    path: str | os.PathLike[str],
) -> None:
    """Draw the sites of a report into a file.

    Args:
        traces: The sites, in the order of a run.
        steps: The numbers of the steps.
        bad_site: The first site that was not finite, if any was.
        path: The file.
    """
    figure = figure_of("a report")
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    values = np.asarray([trace.absmax for trace in traces]).reshape(len(traces), -1)
    # Narrow enough to be read on a phone, unless there are many steps.
    figure.set_size_inches(2.9 + 0.14 * max(15, values.shape[1]), 2.0 + 0.22 * len(traces))
    bad = np.asarray([trace.bad for trace in traces]).reshape(values.shape) > 0
    known = np.isfinite(values) & (values > 0)
    magnitudes = np.full(values.shape, np.nan)
    magnitudes[known] = np.log2(values[known])
    # One hue from light to dark; its lightest part would look like the gray of missing numbers.
    colors = ListedColormap(colormaps["Blues"](np.linspace(0.25, 1, 256))).with_extremes(
        bad="#e4e4e4"
    )
    axes = figure.add_subplot()
    first = steps[0] if steps else 0
    extent = (first - 0.5, first + values.shape[1] - 0.5, len(traces) - 0.5, -0.5)
    image = axes.imshow(
        magnitudes, aspect="auto", cmap=colors, extent=extent, interpolation="nearest"
    )
    # A second image over the first: a color map has only one color for missing numbers, and it
    # marks values that were not computed.
    red = np.zeros((*values.shape, 4))
    red[bad] = (*(int(_BAD[i : i + 2], 16) / 255 for i in (1, 3, 5)), 1.0)
    axes.imshow(red, aspect="auto", extent=extent, interpolation="nearest")
    axes.set_yticks(range(len(traces)), [_name(trace) for trace in traces], fontsize=9)
    if bad_site is not None:
        for label, trace in zip(axes.get_yticklabels(), traces, strict=True):
            if trace.site == bad_site:
                label.set_color(_BAD)
                label.set_fontweight("bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step")
    axes.xaxis.set_label_coords(-0.02, -0.02)
    axes.xaxis.label.set_horizontalalignment("right")
    figure.colorbar(image, ax=axes, location="bottom", fraction=0.06, aspect=40)
    # Below the whole figure, where there is more room than below the map.
    figure.supxlabel(
        "color: largest magnitude, as a power of 2\n"
        "red: not finite; gray: all zero or not computed",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _name(trace: Trace) -> str:
    site = trace.site
    return site.path or f"{site.source.short} {site.op}, {site.stage}"
