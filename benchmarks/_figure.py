"""The picture of the memory benchmark: peak memory and traffic over the batch, for each model."""

import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from benchmarks._pictures import LIGHT, save, sheet

TARGET, GEMM = "h100", "library"
REFERENCE = "f32"

# One color per way to write a step, on all pictures; halfstep's is the strong one.
COLORS: Mapping[str, str] = MappingProxyType(
    {
        "f32": LIGHT.gray,
        "by hand, bf16": LIGHT.green,
        "mpx, f16": LIGHT.orange,
        "halfstep, bf16": LIGHT.blue,
        "halfstep, f16": LIGHT.blue,
    }
)
# The others are drawn thin and first, halfstep's lines wide and on top of them.
STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "by hand, bf16": {"linewidth": 1.5, "marker": "o", "markersize": 4},
        "mpx, f16": {"linewidth": 1.5, "marker": "s", "markersize": 4},
        "halfstep, bf16": {"linewidth": 2.8, "marker": "o", "markersize": 6},
        "halfstep, f16": {
            "linewidth": 1.8,
            "linestyle": (0, (2, 1.5)),
            "marker": "s",
            "markersize": 6,
            "markerfacecolor": "white",
        },
    }
)


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a report of `benchmarks.memory`: the models that were compiled at several batches.

    Steps are drawn as shares of the float32 step at the same batch. In GiB, all 16-bit steps lie
    on one another next to float32.
    """
    rows = [r for r in made["rows"] if r["gemm"] == GEMM and "refused" not in r]
    batches = {model: {r["batch"] for r in rows if r["model"] == model} for model in made["models"]}
    models = [model for model, found in batches.items() if len(found) > 1]
    figure = sheet(5.6)
    panels = figure.subplots(2, len(models), squeeze=False, sharex="col", sharey=True)
    for column, model in enumerate(models):
        drawn = [r for r in rows if r["model"] == model and r["target"] == TARGET]
        for axes, what in zip(panels[:, column], ("peak", "traffic"), strict=True):
            lines(axes, drawn, f"{what}_bytes")
        panels[0, column].set_title(model)
        panels[1, column].set_xlabel("batch")
        found = sorted({r["batch"] for r in drawn})
        panels[1, column].set_xticks(found, [str(batch) for batch in found])
        panels[1, column].minorticks_off()
    panels[0, 0].set_ylabel("peak memory,\nshare of float32's")
    panels[1, 0].set_ylabel("memory traffic,\nshare of float32's")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    figure.supxlabel("compiled for an H100, not run", fontsize=10)
    save(figure, path, made)


def shares(rows: Sequence[Mapping[str, Any]], step: str, key: str) -> list[tuple[int, float]]:
    """The batches of a step, and what it takes there as a percentage of float32's."""
    whole = {row["batch"]: row[key] for row in rows if row["step"] == REFERENCE}
    mine = {row["batch"]: row[key] for row in rows if row["step"] == step}
    return [(batch, 100 * mine[batch] / whole[batch]) for batch in sorted(mine.keys() & whole)]


def lines(axes: Axes, rows: list[dict[str, Any]], key: str) -> None:
    """One line per step."""
    for step, style in STYLES.items():
        if points := shares(rows, step, key):
            axes.plot(*zip(*points, strict=True), label=step, color=COLORS[step], **style)
    axes.set_xscale("log", base=2)
    axes.margins(x=0.12)
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=0))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
