"""A map of magnitudes: sites and steps."""

import os
from collections.abc import Sequence

import numpy as np

from halfstep._base import figure_of
from halfstep.debug._instrument.site import Site
from halfstep.debug._record.history import Trace

_BAD = "#d32f2f"


def plot(
    traces: Sequence[Trace],
    steps: Sequence[int],
    bad_site: Site | None,
    path: str | os.PathLike[str],
) -> None:
    """Draw the sites of a report into a file.

    Args:
        traces: The sites, in the order of a run.
        steps: The numbers of the steps.
        bad_site: The first one that was not finite, if any was.
        path: The file.
    """
    figure = figure_of("a report")
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    values = np.asarray([trace.absmax for trace in traces]).reshape(len(traces), -1)
    figure.set_size_inches(4.5 + 0.22 * max(10, values.shape[1]), 1.6 + 0.2 * len(traces))
    bad = np.asarray([trace.bad for trace in traces]).reshape(values.shape) > 0
    known = np.isfinite(values) & (values > 0)
    magnitudes = np.full(values.shape, np.nan)
    magnitudes[known] = np.log2(values[known])
    colors = colormaps["viridis"].with_extremes(bad="#eeeeee")
    axes = figure.add_subplot()
    first = steps[0] if steps else 0
    extent = (first - 0.5, first + values.shape[1] - 0.5, len(traces) - 0.5, -0.5)
    image = axes.imshow(
        magnitudes, aspect="auto", cmap=colors, extent=extent, interpolation="nearest"
    )
    red = np.zeros((*values.shape, 4))
    red[bad] = (*(int(_BAD[i : i + 2], 16) / 255 for i in (1, 3, 5)), 1.0)
    axes.imshow(red, aspect="auto", extent=extent, interpolation="nearest")
    axes.set_yticks(range(len(traces)), [_name(trace) for trace in traces], fontsize=7)
    if bad_site is not None:
        for label, trace in zip(axes.get_yticklabels(), traces, strict=True):
            if trace.site == bad_site:
                label.set_color(_BAD)
                label.set_fontweight("bold")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step; red: not finite, gray: all zero or not computed")
    figure.colorbar(image, label="largest magnitude, as a power of 2", shrink=0.8)
    figure.savefig(path, dpi=150)


def _name(trace: Trace) -> str:
    site = trace.site
    return site.path or f"{site.source.short} {site.op}, {site.stage}"
