"""A map of magnitudes: sites and steps."""

import os
from typing import TYPE_CHECKING

import numpy as np

from halfstep._figure import figure_of

if TYPE_CHECKING:
    from halfstep.debug._report import DebugReport, Trace

# As many sites as a page has lines for.
_SITES = 60
_BAD = "#d32f2f"


def plot(report: "DebugReport", path: str | os.PathLike[str]) -> None:
    """Draw a report into a file."""
    figure = figure_of("a report")
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    traces = _chosen(report)
    values = np.asarray([trace.absmax for trace in traces]).reshape(len(traces), -1)
    figure.set_size_inches(4.5 + 0.22 * max(10, values.shape[1]), 1.6 + 0.2 * len(traces))
    bad = np.asarray([trace.bad for trace in traces]).reshape(values.shape) > 0
    known = np.isfinite(values) & (values > 0)
    magnitudes = np.full(values.shape, np.nan)
    magnitudes[known] = np.log2(values[known])
    colors = colormaps["viridis"].with_extremes(bad="#eeeeee")
    axes = figure.add_subplot()
    first = report.steps[0] if report.steps else 0
    extent = (first - 0.5, first + values.shape[1] - 0.5, len(traces) - 0.5, -0.5)
    image = axes.imshow(
        magnitudes, aspect="auto", cmap=colors, extent=extent, interpolation="nearest"
    )
    red = np.zeros((*values.shape, 4))
    red[bad] = (*(int(_BAD[i : i + 2], 16) / 255 for i in (1, 3, 5)), 1.0)
    axes.imshow(red, aspect="auto", extent=extent, interpolation="nearest")
    axes.set_yticks(range(len(traces)), [_name(trace) for trace in traces], fontsize=7)
    if report.found is not None:
        for label, trace in zip(axes.get_yticklabels(), traces, strict=True):
            if trace.site == report.found.site:
                label.set_color(_BAD)
                label.set_fontweight("bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step; red: not finite, gray: all zero or not computed")
    figure.colorbar(image, label="largest magnitude, as a power of 2", shrink=0.8)
    figure.savefig(path, dpi=150)


def _chosen(report: "DebugReport") -> list["Trace"]:
    """The sites that are drawn, in the order of a run."""
    if len(report.sites) <= _SITES:
        return list(report.sites)
    shown = {id(trace) for trace in report.shown}

    def urgency(trace: "Trace") -> tuple[bool, bool, float]:
        lost = max((*trace.below, *trace.above), default=0.0)
        return id(trace) in shown, any(trace.bad), lost

    order = sorted(range(len(report.sites)), key=lambda n: urgency(report.sites[n]), reverse=True)
    return [report.sites[number] for number in sorted(order[:_SITES])]


def _name(trace: "Trace") -> str:
    site = trace.site
    return site.path or f"{site.source.short} {site.op}, {site.stage}"
