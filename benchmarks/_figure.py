"""The picture of the memory benchmark: peak memory and traffic over the batch, for each model."""

import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks._pictures import save

TARGET, CARD, GEMM = "h100", "rtx4070", "library"

# Colors that stay apart for color-blind readers. Lines of one format lie on one another: the one
# below has large hollow marks, the one above small full ones.
STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "f32": {"color": "#7a7a7a", "linewidth": 2.5, "marker": "D", "markersize": 5},
        "by hand, bf16": {
            "color": "#56b4e9",
            "linewidth": 3.5,
            "marker": "o",
            "markersize": 9.5,
            "markerfacecolor": "white",
            "markeredgewidth": 1.6,
        },
        "mpx, f16": {
            "color": "#e69f00",
            "linewidth": 3.5,
            "marker": "s",
            "markersize": 8.5,
            "markerfacecolor": "none",
            "markeredgewidth": 1.6,
        },
        "halfstep, bf16": {
            "color": "#0072b2",
            "linewidth": 1.5,
            "marker": "o",
            "markersize": 4.5,
        },
        "halfstep, f16": {
            "color": "#a03c00",
            "linewidth": 1.5,
            "linestyle": (0, (3, 2)),
            "marker": "s",
            "markersize": 4,
        },
    }
)


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a report of `benchmarks.memory`: the models that were compiled at several batches."""
    rows = [r for r in made["rows"] if r["gemm"] == GEMM and "refused" not in r]
    batches = {model: {r["batch"] for r in rows if r["model"] == model} for model in made["models"]}
    models = [model for model, found in batches.items() if len(found) > 1]
    figure = Figure(figsize=(9, 6.8), layout="constrained")
    panels = figure.subplots(2, len(models), squeeze=False, sharex="col")
    for column, model in enumerate(models):
        mine = [r for r in rows if r["model"] == model]
        drawn = [r for r in mine if r["target"] == TARGET]
        for axes, what in zip(panels[:, column], ("peak", "traffic"), strict=True):
            lines(axes, drawn, f"{what}_bytes")
        panels[0, column].set_title(f"{model}, compiled for an H100")
        limit(panels[0, column], drawn, [r for r in mine if r["target"] == CARD])
        panels[1, column].set_xlabel("batch")
        panels[1, column].set_xticks(sorted({r["batch"] for r in drawn}))
    panels[0, 0].set_ylabel("peak memory (GiB)")
    panels[1, 0].set_ylabel("memory traffic a step (GiB)")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    save(figure, path, made)


def lines(axes: Axes, rows: list[dict[str, Any]], key: str) -> None:
    """One line a step."""
    for step, style in STYLES.items():
        points = sorted((r["batch"], r[key] / 2**30) for r in rows if r["step"] == step)
        if points:
            axes.plot(*zip(*points, strict=True), label=step, **style)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def limit(axes: Axes, drawn: list[dict[str, Any]], card: list[dict[str, Any]]) -> None:
    """What is usable of the smaller card's memory, where some step needs more."""
    usable = {row["usable_bytes"] for row in card}
    if len(usable) != 1 or usable.pop() > max(row["peak_bytes"] for row in drawn):
        return
    height = card[0]["usable_bytes"] / 2**30
    axes.axhline(height, color="black", linewidth=1, linestyle=(0, (5, 3)))
    axes.annotate(
        f"usable on an\nRTX 4070: {height:.1f} GiB",
        (0, height),
        xytext=(4, 4),
        textcoords="offset points",
        fontsize=9,
    )
