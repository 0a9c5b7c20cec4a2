"""The picture of how a step grows: memory and sent bytes over the number of devices."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks._pictures import LIGHT, save, sheet
from benchmarks._scale_steps import ALL
from benchmarks._scale_tables import Row, sent

# Lines that lie on one another differ in width.
STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "f32": {"color": LIGHT.gray, "linewidth": 2.5},
        "bf16": {"color": LIGHT.blue, "linewidth": 2.5},
        "f8, flash": {"color": LIGHT.orange, "linewidth": 3.5},
        "f8, flash, release": {"color": LIGHT.red, "linewidth": 1.5, "linestyle": (0, (3, 2))},
    }
)
LINE = "h100"
MARKS: Mapping[str, str] = MappingProxyType({"v5e": "^", "v5p": "s"})
GROUPED = "x"


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a report of `benchmarks.scale`: lines for GPUs, marks for TPUs."""
    rows = [row for row in made["rows"] if row.get("peak_bytes") is not None]
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = sheet(7.0)
    panels = figure.subplots(2, len(models), squeeze=False, sharex=True, sharey="row")
    counts = sorted({row["devices"] for row in rows if row["target"].startswith(LINE)})
    for column, model in enumerate(models):
        mine = [row for row in rows if row["model"] == model]
        draw(panels[0, column], mine, lambda row: row["peak_bytes"])
        draw(panels[1, column], mine, sent)
        panels[1, column].set_xticks(counts, [f"{count:,}" for count in counts])
        panels[1, column].minorticks_off()
        panels[1, column].set_xlabel("devices")
        panels[0, column].set_title(f"{model} parameters")
    panels[0, 0].set_ylabel("peak memory per device (GiB)")
    panels[1, 0].set_ylabel("sent per device and step (GiB)")
    figure.legend(handles=legend(rows), loc="outside upper center", ncols=2, frameon=False)
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
                markersize=7,
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
