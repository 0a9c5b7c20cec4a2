"""Entries as stacked bars: memory by role, one bar a target and variant."""

import os
from collections.abc import Sequence

from halfstep._base import figure_of, size
from halfstep._preflight.report.entry import CODE, OUTPUTS, PADDING, TEMPORARIES, PreflightEntry
from halfstep._preflight.report.roles import BATCH, OPTIMIZER, OTHER, PARAMETERS

# Told apart also by readers who do not see all colors (Okabe and Ito's palette).
_COLORS = (
    (PARAMETERS, "#0072B2"),
    (OPTIMIZER, "#56B4E9"),
    (BATCH, "#009E73"),
    (OTHER, "#999999"),
    (PADDING, "#dddddd"),
    (OUTPUTS, "#CC79A7"),
    (CODE, "#F0E442"),
    (TEMPORARIES, "#E69F00"),
)


def plot(entries: Sequence[PreflightEntry], path: str | os.PathLike[str]) -> None:
    """Draw entries into a file."""
    figure = figure_of("a report")
    largest = max(sum(entry.memory.values()) for entry in entries)
    unit, scale = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    figure.set_size_inches(9, 1.6 + 0.42 * len(entries))
    axes = figure.add_subplot()
    rows = range(len(entries))
    starts = [0.0] * len(entries)
    for role, color in _COLORS:
        widths = [entry.memory.get(role, 0) / scale for entry in entries]
        if any(widths):
            axes.barh(rows, widths, left=starts, color=color, label=role, height=0.68)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
    limits = [entry.usable_bytes / scale for entry in entries]
    # A limit far off the scale would press all bars together; the label tells it then.
    right = (max(starts) or 1.0) * 1.25
    near = [limit <= right * 1.6 for limit in limits]
    if any(near):
        right = max(right, *(limit * 1.12 for limit, at in zip(limits, near, strict=True) if at))
    for row, (entry, end, limit, at) in enumerate(zip(entries, starts, limits, near, strict=True)):
        text = f" {size(entry.peak_bytes)}" + ("" if entry.fits else "  does not fit")
        if entry.temp_bytes is None:
            # Only what is known is drawn: the arguments.
            text = "  does not fit: the compiler gave up"
        axes.text(
            end, row, text, va="center", fontsize=9, color="black" if entry.fits else "#b00020"
        )
        if at:
            label = "usable memory" if row == near.index(True) else None
            axes.plot([limit, limit], [row - 0.42, row + 0.42], color="black", lw=2, label=label)
    axes.set_yticks(rows, [_name(entry, entries) for entry in entries])
    axes.invert_yaxis()
    axes.set_xlim(0, right)
    axes.set_xlabel(f"peak memory of one device, {unit} (compiled, not run)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def _name(entry: PreflightEntry, entries: Sequence[PreflightEntry]) -> str:
    several = len({other.variant for other in entries}) > 1
    return f"{entry.target}\n{entry.variant}" if several else entry.target
