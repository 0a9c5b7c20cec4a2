"""A comparison as a picture."""

import math
import os
from collections.abc import Sequence
from typing import Any

from halfstep._base import figure_of
from halfstep.debug._compare.deviation import Deviation, GradientDeviation

_LINE, _JUMP = "#1565c0", "#d32f2f"
# As many sites are named, and as many gradients are drawn, as there is room for.
_NAMED, _GRADIENTS = 8, 30


def plot(
    title: str,
    sites: Sequence[Deviation],
    worst: Sequence[Deviation],
    gradients: Sequence[GradientDeviation],
    path: str | os.PathLike[str],
) -> None:
    """Draw a comparison into a file.

    Args:
        title: What is compared.
        sites: In the order of a run.
        worst: Those that add error, most first.
        gradients: Of a loss, how far the gradient of each parameter is off.
        path: The file.
    """
    figure = figure_of("a comparison")
    panels = 1 + bool(gradients)
    figure.set_size_inches(10, 4.2 * panels)
    axes = figure.add_subplot(panels, 1, 1)
    axes.set_title(title, fontsize=10)
    _draw_sites(axes, sites, worst)
    if gradients:
        _draw_gradients(figure.add_subplot(panels, 1, 2), gradients)
    figure.savefig(path, dpi=150)


def _points(site: Deviation) -> tuple[float, ...]:
    return site.turns or (site.error,)


def _draw_sites(axes: Any, sites: Sequence[Deviation], worst: Sequence[Deviation]) -> None:
    # Arguments are the same in both.
    shown = [site for site in sites if site.error or not site.site.path]
    ends, values = [], []
    for site in shown:
        values += _points(site)
        ends.append(len(values))
    finite = [value for value in values if math.isfinite(value) and value > 0]
    floor, top = min(finite, default=1e-8), max(finite, default=1.0)

    def height(value: float) -> float:
        return 3 * top if not math.isfinite(value) else max(value, floor)

    axes.plot(range(len(values)), [height(value) for value in values], color=_LINE, lw=1)
    bad = [at for at, value in enumerate(values) if not math.isfinite(value)]
    axes.scatter(bad, [3 * top] * len(bad), color=_JUMP, marker="x", s=18, zorder=3)
    positions = {id(site): end for site, end in zip(shown, ends, strict=True)}
    names = []
    for number, site in enumerate(worst[:_NAMED], 1):
        points = _points(site)
        turn = site.turn or 0
        at = positions[id(site)] - len(points) + turn
        axes.scatter([at], [height(points[turn])], color=_JUMP, s=22, zorder=4)
        axes.annotate(
            str(number),
            (at, height(points[turn])),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=_JUMP,
        )
        scope = f" in {site.site.scope}" if site.site.scope else ""
        names.append(f"{number}  {site.site.path or site.site.source.short} {site.site.op}{scope}")
    axes.set_yscale("log")
    axes.set_xlabel("values in the order of a run, every turn of a loop; x: not finite")
    axes.set_ylabel("relative error")
    if names:
        axes.text(
            1.01, 1, "most error is added at\n" + "\n".join(names), transform=axes.transAxes,
            va="top", fontsize=7,
        )  # fmt: skip
    axes.grid(alpha=0.3)


def _draw_gradients(axes: Any, gradients: Sequence[GradientDeviation]) -> None:
    order = sorted(gradients, key=lambda one: -one.error)[:_GRADIENTS]
    finite = [one.error for one in order if math.isfinite(one.error)]
    top = max(finite, default=1.0) or 1.0
    lengths = [one.error if math.isfinite(one.error) else 1.5 * top for one in order]
    colors = [_LINE if math.isfinite(one.error) else _JUMP for one in order]
    axes.barh(range(len(order)), lengths, color=colors)
    axes.set_yticks(range(len(order)), [one.path for one in order], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("relative error of gradients, the worst; red: not finite")
    axes.grid(alpha=0.3, axis="x")
