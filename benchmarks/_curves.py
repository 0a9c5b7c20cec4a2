"""The picture of the training benchmark: the loss of each precision, and how far from float32's."""

import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from benchmarks import _dots
from benchmarks._pictures import LIGHT, save, sheet
from examples._plot import STYLES, draw, smooth

# In the lower panel the two lie on one another, with bands around both.
APART: Mapping[str, Any] = {"linewidth": 1.6}
OTHERS: Mapping[str, Any] = MappingProxyType(
    {
        name: {**STYLES[like], "label": name}
        for name, like in (
            ("optax.adamw, f32", "f32"),
            ("flash_adamw, 24 bits", "bf16"),
            ("plan", "bf16"),
            ("plan, 8 and 4 bits", "f16"),
        )
    }
)
"""Of optimizers and plans."""
# Recipes by what shares a scale: a tensor, a row, or a block. Where there are two, one is dashed.
RECIPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "f8": {"color": LIGHT.orange, "linestyle": "-"},
        "f8-row": {"color": LIGHT.orange, "linestyle": (0, (2, 1.5))},
        "f8-block": {"color": LIGHT.blue, "linestyle": "-"},
        "mxfp8": {"color": LIGHT.blue, "linestyle": (0, (2, 1.5))},
    }
)
MANY = 5
WINDOW = 0.1
"""The window of a running mean, as a share of the run: single steps would hide what differs."""


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a report of `benchmarks.training`, or of one like it; of many policies, their ends."""
    policies = list(dict.fromkeys(run["policy"] for run in made["runs"]))
    if len(policies) > MANY:
        _dots.plot(made, path)
        return
    styles = styles_of(policies)
    first, single = next(iter(styles)), not RECIPES.keys().isdisjoint(styles)
    figure = sheet(5.6)
    panels = figure.subplots(
        2, len(made["tasks"]), squeeze=False, sharex="col", sharey="row", height_ratios=(1.6, 1)
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
            draw(losses, steps, rows.mean(axis=0, keepdims=True) if single else rows, style)
            if policy != first:
                percent = 100 * (curves[policy] / curves[first] - 1)
                if single:
                    percent = percent.mean(axis=0, keepdims=True)
                percent = smooth(percent, round(WINDOW * len(steps)))
                draw(apart, steps, percent, {**style, **APART, "label": "_"})
        guess(losses, about["guessing"])
        bar(apart, made["bar_percent"])
        tail = about["steps"] * (1 - made["tail"])
        for axes in (losses, apart):
            axes.axvspan(tail, about["steps"], color="#000000", alpha=0.05, linewidth=0)
            axes.set_xlim(0, about["steps"])
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.grid(color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        apart.annotate(
            "final loss",
            ((tail + about["steps"]) / 2, 0.9),
            xycoords=("data", "axes fraction"),
            ha="center",
            fontsize=9.5,
            bbox={"facecolor": "#f2f2f2", "edgecolor": "none", "pad": 1.5},
        )
        skips(apart, [run for run in runs if run["skipped"]])
        losses.set_title(task, fontsize=11)
        apart.set_xlabel("step")
    panels[0, 0].set_ylabel("training loss")
    panels[1, 0].set_ylabel(f"difference to\n{first},\nrunning mean")
    pairs = zip(*panels[0, 0].get_legend_handles_labels(), strict=True)
    marks = (zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels[1])
    named = {label: handle for group in (pairs, *marks) for handle, label in group}
    figure.legend(
        list(named.values()), list(named), loc="outside upper center", ncols=3, frameon=False
    )
    save(figure, path, made)


def styles_of(policies: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """How each is drawn; the first is wide and light, below the others."""
    first, *others = policies
    made: dict[str, Mapping[str, Any]] = {first: {**STYLES["f32"], "label": first}}
    known = {**STYLES, **OTHERS}
    for policy in others:
        recipe = {**RECIPES.get(policy, {}), "linewidth": 1.8, "label": policy}
        made[policy] = recipe if policy in RECIPES else known[policy]
    is_wide = others[0] in RECIPES or first not in {"f32", *OTHERS}
    return made if is_wide else {**made, first: known[first]}


def guess(axes: Axes, height: float) -> None:
    """The loss of the best guess that does not look at its input."""
    axes.axhline(height, color="#333333", linewidth=1, linestyle=(0, (5, 3)))
    axes.annotate(
        "best constant guess",
        (1, height),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        ha="right",
        fontsize=9.5,
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
