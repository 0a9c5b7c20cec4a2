"""The picture of the training benchmark: the loss of each precision, and how far from float32's."""

import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks._pictures import save
from examples._plot import STYLES, draw, smooth

# In the lower panel the two lie on one another, with bands around both.
APART: Mapping[str, Any] = {"linewidth": 1.6}
OTHERS: Mapping[str, Any] = MappingProxyType(
    {
        name: {**STYLES[like], "label": name}
        for name, like in (
            ("optax.adamw, f32", "f32"),
            ("flash_adamw, 24 bits", "bf16"),
        )
    }
)
"""Of optimizers."""
# For many, of which each is one line: also told apart without color by their ends in the legend.
COLORS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#8c6d31", "#000000")
MANY = 4
WINDOW = 21
"""How many means of steps a running mean is of, where single ones would hide one another."""


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a report of `benchmarks.training`, or of one like it."""
    styles = styles_of(list(dict.fromkeys(run["policy"] for run in made["runs"])))
    first, many = next(iter(styles)), len(styles) > MANY
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplots(
        2, len(made["tasks"]), squeeze=False, sharex="col", height_ratios=(2, 1.15)
    )
    for column, (task, about) in enumerate(made["tasks"].items()):
        runs = [run for run in made["runs"] if run["task"] == task]
        curves: dict[str, Any] = {
            policy: np.asarray([run["curve"] for run in runs if run["policy"] == policy])
            for policy in styles
        }
        # A mean stands in the middle of the steps that it is of.
        steps = (np.arange(curves[first].shape[1]) + 0.5) * made["every"]
        losses, apart = panels[:, column]
        for policy, style in styles.items():
            rows = curves[policy]
            draw(losses, steps, rows.mean(axis=0, keepdims=True) if many else rows, style)
            if policy != first:
                percent = 100 * (curves[policy] / curves[first] - 1)
                if many:
                    percent = smooth(percent.mean(axis=0, keepdims=True), WINDOW)
                draw(apart, steps, percent, {**style, **APART, "label": "_"})
        guess(losses, about["guessing"])
        bar(apart, made["bar_percent"])
        tail = about["steps"] * (1 - made["tail"])
        for axes in (losses, apart):
            axes.axvspan(tail, about["steps"], color="#000000", alpha=0.05, linewidth=0)
            axes.set_xlim(0, about["steps"])
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        apart.annotate(
            "final loss",
            ((tail + about["steps"]) / 2, 0.9),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=9,
            bbox={"facecolor": "#f2f2f2", "edgecolor": "none", "pad": 1.5},
        )
        skips(apart, [run for run in runs if run["skipped"]])
        losses.set_title(task)
        apart.set_xlabel("step")
    panels[0, 0].set_ylabel("training loss")
    panels[1, 0].set_ylabel(f"difference to {first}")
    pairs = zip(*panels[0, 0].get_legend_handles_labels(), strict=True)
    marks = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels[1])
    named = {label: handle for group in (pairs, *marks) for handle, label in group}
    figure.legend(
        list(named.values()), list(named), loc="outside upper center", ncols=5, frameon=False
    )
    save(figure, path, made)


def styles_of(policies: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """How each is drawn; of many the first is wide and light, below the others."""
    if len(policies) <= MANY:
        return {policy: {**STYLES, **OTHERS}[policy] for policy in policies}
    first, *others = policies
    made: dict[str, Mapping[str, Any]] = {first: {**STYLES["f32"], "label": first}}
    for policy, color in zip(others, COLORS[: len(others)], strict=True):
        made[policy] = {**STYLES["bf16"], "color": color, "linewidth": 1.2, "label": policy}
    return made


def guess(axes: Axes, height: float) -> None:
    """The loss of the best guess that does not look at its input."""
    axes.axhline(height, color="#333333", linewidth=1, linestyle=(0, (5, 3)))
    axes.annotate(
        "the best constant guess",
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )


def skips(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    """Where a run last skipped a step: from there it is one update behind the others."""
    if runs:
        axes.plot(
            [run["last_skipped"] for run in runs],
            [0.04] * len(runs),
            "^",
            transform=axes.get_xaxis_transform(),
            color=STYLES["f16"]["color"],
            markersize=6,
            clip_on=False,
            label="a seed skips a step",
        )


def bar(axes: Axes, percent: float) -> None:
    """Where the final loss must lie."""
    for height in (-percent, percent):
        axes.axhline(height, color="#333333", linewidth=1, linestyle=(0, (5, 3)))
    axes.axhline(0, color="#777777", linewidth=0.8)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -1.6 * percent), max(high, 1.6 * percent))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g} %" if y else "0"))
