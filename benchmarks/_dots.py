"""The picture of the fp8 training benchmark: how far each recipe's final loss is from bfloat16's.

A dot per seed, for each recipe. The curves of eight recipes lie on one another, and one that is far
away would squeeze the others: here it is named at the edge instead.
"""

import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from benchmarks._pictures import LIGHT, save, sheet

# By what shares a scale: a tensor, a row, or a block.
KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "one scale per tensor": (LIGHT.orange, ("f8", "f8-e4m3", "f8-delayed")),
        "per row": (LIGHT.green, ("f8-row", "f8-row-gw")),
        "per block": (LIGHT.blue, ("f8-block", "mxfp8", "nvfp4")),
    }
)
FAR = 3.0
"""A recipe whose mean is so many times as far as the median recipe's is named at the edge."""


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a report of `benchmarks.fp8_training`."""
    tasks = list(made["tasks"])
    figure = sheet(3.1 * len(tasks) + 0.6)
    for axes, task in zip(
        figure.subplots(len(tasks), 1, squeeze=False).ravel(), tasks, strict=True
    ):
        rows = [row for row in made["results"] if row["task"] == task]
        _panel(axes, [row for row in rows if row["final_percent"] or any(_seeds(row))], made)
        axes.set_title(task)
    axes = figure.axes[0]
    handles = [
        axes.plot([], [], "o", color=color, label=kind)[0] for kind, (color, _) in KINDS.items()
    ]
    figure.legend(
        handles=handles, loc="outside upper center", ncols=3, frameon=False, handletextpad=0
    )
    figure.supxlabel("final training loss compared with bf16; a dot per seed", fontsize=10)
    save(figure, path, made)


def _seeds(row: Mapping[str, Any]) -> list[float]:
    return row["final_percent_of_seeds"]


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]], made: Mapping[str, Any]) -> None:
    shown = near(rows)
    colors = {name: color for color, names in KINDS.values() for name in names}
    bar = made["bar_percent"]
    ends = [value for row in shown for value in _seeds(row)] + [-bar, bar]
    low, high = min(ends), max(ends)
    room = 0.12 * (high - low)
    axes.axvspan(-bar, bar, color=LIGHT.faint, alpha=0.5, linewidth=0)
    axes.axvline(0, color="#777777", linewidth=0.8)
    for place, row in enumerate(rows):
        # A policy with rules has the color of its recipe.
        color = colors[row["policy"].partition(",")[0]]
        if row in shown:
            axes.plot(
                _seeds(row), [place] * len(_seeds(row)), "o", color=color, ms=5, alpha=0.6, mew=0
            )
            axes.plot(row["final_percent"], place, "|", color=color, markersize=16, mew=2.5)
        else:
            said = f"{row['final_percent']:+.2g} % \N{RIGHTWARDS ARROW}"
            axes.text(high + room, place, said, ha="right", va="center", color=color)
    names = [row["policy"].replace(",", ",\n") for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(low - room, high + room)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:+.2g} %" if x else "0")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)


def near(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The recipes that are not far from the others."""
    apart = sorted(abs(row["final_percent"]) for row in rows)
    return [row for row in rows if abs(row["final_percent"]) <= FAR * apart[len(apart) // 2] + 0.1]
