"""The picture of how a step grows: memory and sent bytes over the number of devices."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks._pictures import save
from benchmarks._scale_steps import ALL
from benchmarks._scale_tables import Row, sent

# Colors that stay apart for color-blind readers; lines that lie on one another differ in width.
STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "f32": {"color": "#7a7a7a", "linewidth": 2.5},
        "bf16": {"color": "#0072b2", "linewidth": 3.5},
        "f8, flash": {"color": "#e69f00", "linewidth": 2.0},
        "f8, flash, release": {"color": "#a03c00", "linewidth": 1.5, "linestyle": (0, (3, 2))},
    }
)
LINE = "h100"
MARKS: Mapping[str, str] = MappingProxyType({"v5e": "^", "v5p": "s"})
GROUPED = "x"


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a report of `benchmarks.scale`: lines for GPUs, marks for TPUs."""
    rows = [row for row in made["rows"] if row.get("peak_bytes") is not None]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(9, 6.8), layout="constrained")
    panels = figure.subplots(2, len(models), squeeze=False, sharex=True, sharey="row")
    counts = sorted({row["devices"] for row in rows})
    for column, model in enumerate(models):
        mine = [row for row in rows if row["model"] == model]
        draw(panels[0, column], mine, lambda row: row["peak_bytes"])
        draw(panels[1, column], mine, sent)
        panels[1, column].set_xticks(counts, [f"{count:,}" for count in counts], fontsize=8)
        panels[1, column].minorticks_off()
        panels[1, column].set_xlabel("devices")
        panels[0, column].set_title(f"{model} parameters")
    panels[0, 0].set_ylabel("peak memory a device (GiB)")
    panels[1, 0].set_ylabel("sent by a device in a step (GiB)")
    figure.legend(
        handles=legend(rows), loc="outside upper center", ncols=4, frameon=False, fontsize=9
    )
    save(figure, path, made)


def draw(axes: Axes, rows: Sequence[Row], value: Callable[[Row], float | None]) -> None:
    """One line a recipe over GPUs, and marks beside it."""
    for recipe, style in STYLES.items():
        mine = [row for row in rows if row["recipe"] == recipe and value(row) is not None]
        points = sorted(
            (row["devices"], (value(row) or 0) / 2**30)
            for row in mine
            if row["target"].startswith(LINE) and row["layout"] == ALL
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4.5, **style)
        for row in mine:
            name = row["target"].partition(":")[0]
            mark = GROUPED if row["layout"] != ALL else MARKS.get(name)
            if mark is None:
                continue
            axes.plot(
                row["devices"],
                (value(row) or 0) / 2**30,
                linestyle="none",
                marker=mark,
                markersize=8,
                zorder=5,
                markerfacecolor="none",
                markeredgewidth=1.6,
                color=style["color"],
            )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda number, _: f"{number:g}")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend(rows: Sequence[Row]) -> list[Line2D]:
    """Recipes by color, kinds of devices by mark."""
    recipes = {row["recipe"] for row in rows}
    made = [
        Line2D([], [], label=f"{recipe}, H100", marker="o", markersize=4.5, **style)
        for recipe, style in STYLES.items()
        if recipe in recipes
    ]
    marks = {"TPU v5e": MARKS["v5e"], "TPU v5p": MARKS["v5p"], "H100, groups of 256": GROUPED}
    made += [
        Line2D([], [], label=label, marker=mark, linestyle="none", color="black", fillstyle="none")
        for label, mark in marks.items()
    ]
    return made
