"""Draw the history of a live view: one panel per kind of number, above a common axis of steps."""

import os
from typing import Any

import numpy as np

from halfstep._base import figure_of
from halfstep.debug._live.history import (
    KNOWN,
    LOSS,
    OVERFLOW,
    SCALE,
    SKIPPED,
    UNDERFLOW,
    History,
    Part,
)

# Colors that color-blind readers can tell apart.
_COLORS, _BAD = ("#0072b2", "#e69f00"), "#d32f2f"


def draw_panels(history: History, path: str | os.PathLike[str]) -> None:
    """Draw a history into a file."""
    figure = figure_of("the live view")
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    panels = panels_of(history)
    if not panels:
        raise ValueError(
            f"there is nothing to draw yet: {history.updates} updates gave no number. Call "
            "`update` with one first."
        )
    figure.set_size_inches(5.2, 0.6 + 1.6 * len(panels))
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    skips = skipped_points(history)
    for number, (axes, (title, names)) in enumerate(zip(rows, panels.items(), strict=True)):
        for name, color in zip(names, _COLORS, strict=False):
            _curve(axes, history, name, color)
        if SCALE in names:
            axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"$2^{{{y:.0f}}}$"))
        elif UNDERFLOW in names or OVERFLOW in names:
            axes.set_ylim(0, max(axes.get_ylim()[1], 0.001))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.3g} %"))
        # Skips change the scale, so they are marked on its curve; without a scale, they are marked
        # below the first panel's curve.
        if skips.any() and (SCALE in names or (number == 0 and SCALE not in history.names)):
            _mark_skips(axes, history, skips, on_curve=SCALE in names)
        axes.set_title(title, loc="left", fontsize=10)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if any(not label.startswith("_") for label in axes.get_legend_handles_labels()[1]):
            # Next to the title, away from the curves.
            where = {
                "loc": "lower right",
                "bbox_to_anchor": (1, 0.96),
                "ncols": 3,
                "handlelength": 1,
            }
            axes.legend(frameon=False, fontsize=9.5, **where)
    rows[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    rows[-1].set_xlabel("step")
    figure.savefig(path, dpi=150)


def panels_of(history: History) -> dict[str, tuple[str, ...]]:
    """Return the titles of the panels that have data, and the numbers that each one draws."""
    known = set(history.names)
    shares = tuple(name for name in (UNDERFLOW, OVERFLOW) if name in known)
    made: dict[str, tuple[str, ...]] = {"loss": (LOSS,)} if LOSS in known else {}
    if SCALE in known:
        made["loss scale"] = (SCALE,)
    elif SKIPPED in known and not made:
        made["steps skipped"] = (SKIPPED,)
    if shares:
        made["share of elements out of range"] = shares
    return made | {name: (name,) for name in history.names if name not in KNOWN}


def skipped_points(history: History) -> np.ndarray:
    """Find the points in which steps were skipped."""
    if SKIPPED not in history.names:
        return np.zeros(len(history), bool)
    counts = history.part(SKIPPED, Part.LAST)
    known = np.flatnonzero(~np.isnan(counts))
    # A resumed run begins with the skips from before.
    before = 0 if not known.size or history.steps[0] == 0 else counts[known[0]]
    made = np.zeros(len(history), bool)
    made[known] = np.diff(counts[known], prepend=before) > 0
    return made


def _values(history: History, name: str, which: Part | None) -> np.ndarray:
    """Return a number as it is drawn: its mean or one statistic; a scale as its exponent."""
    made = history.mean(name) if which is None else history.part(name, which).astype(float)
    made = np.where(np.isfinite(made), made, np.nan)
    if name != SCALE:
        return made
    exponents = np.full(made.shape, np.nan)
    np.log2(made, out=exponents, where=made > 0)
    return exponents


def _curve(axes: Any, history: History, name: str, color: str) -> None:
    steps = history.steps
    # A count and a power of 2 have no mean.
    has_mean = name not in (SCALE, SKIPPED)
    values = _values(history, name, None if has_mean else Part.LAST)
    # A number that is not given every time has gaps, which are not drawn.
    known = ~np.isnan(values) | (history.part(name, Part.BAD) > 0)
    style = "default" if has_mean else "steps-post"
    label = name if name in (UNDERFLOW, OVERFLOW) else None
    marker = "." if known.sum() < 2 else None
    axes.plot(
        steps[known], values[known], color=color, lw=1.3, ds=style, label=label, marker=marker
    )
    # Once a point covers several updates, its mean hides single outliers.
    if history.width > 1:
        low, high = (_values(history, name, part) for part in (Part.LOW, Part.HIGH))
        fill = {"color": color, "alpha": 0.2, "linewidth": 0}
        axes.fill_between(steps[known], low[known], high[known], **fill)
    bad = history.part(name, Part.BAD) > 0
    if bad.any():
        _rug(axes, steps[bad], 0.96, "not finite", "x")


def _mark_skips(axes: Any, history: History, skips: np.ndarray, *, on_curve: bool) -> None:
    if not on_curve:
        _rug(axes, history.steps[skips], 0.04, "skipped", "|")
        return
    # On the curve of the scale, a skip shows next to its effect on the scale.
    scales = _values(history, SCALE, Part.LAST)[skips]
    style = {"color": _BAD, "markersize": 6, "label": "skipped"}
    axes.plot(history.steps[skips], scales, ".", **style)


def _rug(axes: Any, steps: np.ndarray, height: float, label: str, marker: str) -> None:
    """Draw marks at a height of the panel, from 0 to 1."""
    heights = np.full(len(steps), height)
    where = axes.get_xaxis_transform()
    axes.plot(steps, heights, marker, color=_BAD, markersize=5, transform=where, label=label)
