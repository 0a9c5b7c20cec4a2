"""The curves of several runs in one picture: training loss, test accuracy, loss scale."""

import pathlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

Record = Mapping[str, Any]

# Colors that stay apart for color-blind readers. The curves of the policies lie on one another:
# float32 is wide and light, so that the other two are seen on top of it.
STYLES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "f32": {"color": "#a8aeb6", "linestyle": "-", "linewidth": 4.5, "label": "float32"},
        "bf16": {"color": "#0067a5", "linestyle": "-", "linewidth": 1.8, "label": "bfloat16"},
        "f16": {
            "color": "#b45f06",
            "linestyle": (0, (2.5, 2.5)),
            "linewidth": 1.8,
            "label": "float16",
        },
    }
)


def curve(runs: Sequence[Sequence[Record]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which `key` was recorded, and its values as one row a run."""
    rows = [[(r["step"], r[key]) for r in run if key in r] for run in runs]
    shortest = min(map(len, rows))
    table = np.asarray([row[:shortest] for row in rows], float).reshape(len(rows), shortest, 2)
    return table[0, :, 0], table[:, :, 1]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """A running mean along the last axis; the window is centered and shrinks at the ends.

    A loss that is not finite leaves a gap, not the rest of the curve.
    """
    known = np.ma.masked_invalid(values)
    half, size = window // 2, values.shape[-1]
    parts = [known[:, max(0, n - half) : n + half + 1].mean(axis=-1) for n in range(size)]
    return np.ma.stack(parts, axis=-1).filled(np.nan)


def draw(axes: Axes, steps: np.ndarray, rows: np.ndarray, style: Mapping[str, Any]) -> None:
    """The mean of the runs as a line; from the lowest to the highest as a band."""
    axes.plot(steps, rows.mean(axis=0), solid_capstyle="butt", **style)
    if len(rows) > 1:
        low, high = rows.min(axis=0), rows.max(axis=0)
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.18, linewidth=0)


def draw_scales(
    axes: Axes,
    runs: Mapping[str, Sequence[Sequence[Record]]],
    others: Mapping[str, Sequence[Record]],
) -> None:
    """One stair a run, for the runs that have a loss scale; a dot where steps were skipped."""
    scaled = {name: rs for name, rs in runs.items() if np.any(curve(rs, "loss_scale")[1] != 1)}
    lines = [
        (run, str(STYLES[name]["label"]) if index == 0 else None, STYLES[name]["color"], "-")
        for name, group in scaled.items()
        for index, run in enumerate(group)
    ]
    lines += [(run, label, "#b3261e", (0, (4, 1))) for label, run in others.items()]
    for run, label, color, dashes in lines:
        steps, scales = (x.ravel() for x in curve([run], "loss_scale"))
        axes.step(steps, scales, where="post", color=color, ls=dashes, lw=1.4, label=label)
        skipped = np.diff(curve([run], "skipped")[1].ravel(), prepend=0) > 0
        axes.plot(steps[skipped], scales[skipped], ".", color=color, markersize=5)
    axes.set_yscale("log", base=2)
    # Room for the legend above the stairs, a third of what they span.
    low, high = np.log2(axes.get_ylim())
    axes.set_ylim(top=2 ** (high + max(2.0, (high - low) / 3)))
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axes.yaxis.set_minor_locator(NullLocator())
    if lines:
        axes.plot([], [], ".", color="#555555", markersize=5, label="steps skipped")
    unscaled = [str(STYLES[name]["label"]) for name in runs if name not in scaled]
    if unscaled:
        axes.plot([], [], " ", label=f"none for {' and '.join(unscaled)}")
    axes.legend(frameon=False, loc="upper center", handlelength=1.6)


def plot_curves(
    runs: Mapping[str, Sequence[Sequence[Record]]],
    path: pathlib.Path,
    *,
    title: str,
    others: Mapping[str, Sequence[Record]] = MappingProxyType({}),
) -> None:
    """Draw the recorded runs of each policy and write the picture.

    Args:
        runs: For each policy, the records of its runs.
        path: The PNG.
        title: A line above the picture.
        others: Runs by label whose loss scale is drawn too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_curves(runs, title=title, others=others).savefig(path, dpi=200)


def draw_curves(
    runs: Mapping[str, Sequence[Sequence[Record]]],
    *,
    title: str,
    others: Mapping[str, Sequence[Record]] = MappingProxyType({}),
) -> Figure:
    """The picture of the recorded runs of each policy."""
    # One below the other, and narrow: so it can also be read on a phone.
    figure = Figure(figsize=(5.0, 8.0), layout="constrained")
    loss_axes, accuracy_axes, scale_axes = figure.subplots(3, 1)
    for name, group in runs.items():
        steps, losses = curve(group, "loss")
        draw(loss_axes, steps, smooth(losses, 5), STYLES[name])
        steps, accuracies = curve(group, "test_accuracy")
        final = f"{STYLES[name]['label']}  {100 * accuracies[:, -1].mean():.2f} %"
        draw(accuracy_axes, steps, 100 * accuracies, {**STYLES[name], "label": final})
    draw_scales(scale_axes, runs, others)
    loss_axes.set_title("Training loss (running mean)")
    loss_axes.legend(frameon=False, loc="upper right")
    accuracy_axes.set_title("Test accuracy")
    accuracy_axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g} %"))
    accuracy_axes.legend(frameon=False, loc="lower right", title="at the end")
    scale_axes.set_title("Loss scale")
    for axes in (loss_axes, accuracy_axes, scale_axes):
        axes.set_xlabel("step")
        axes.set_xlim(0, max(axes.get_xlim()[1], 1))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, wrap=True)
    return figure


def plot_run(records: Sequence[Record], path: pathlib.Path, *, title: str) -> None:
    """Draw the losses and the loss scale of one run, in bits per byte, and write the picture.

    Args:
        records: The run's.
        path: The PNG.
        title: A line above the picture.
    """
    figure = Figure(figsize=(5.0, 5.4), layout="constrained")
    loss_axes, scale_axes = figure.subplots(2, 1, height_ratios=(3, 2))
    steps, losses = curve([records], "loss")
    bits = losses / np.log(2)
    loss_axes.plot(steps, bits[0], color="#0067a5", alpha=0.25, linewidth=1)
    draw(loss_axes, steps, smooth(bits, 5), {"color": "#0067a5", "label": "training"})
    steps, held_out = curve([records], "held_out_loss")
    loss_axes.plot(steps, held_out[0] / np.log(2), "o-", color="#b45f06", ms=4, label="held out")
    loss_axes.set_title("Bits per byte")
    loss_axes.legend(frameon=False)
    steps, scales = curve([records], "loss_scale")
    scale_axes.step(steps, scales[0], where="post", color="#0067a5")
    skipped = np.diff(curve([records], "skipped")[1][0], prepend=0) > 0
    dots = {"color": "#b45f06", "label": f"steps skipped: {records[-1]['skipped']}"}
    scale_axes.plot(steps[skipped], scales[0][skipped], "o", ms=4, **dots)
    scale_axes.set_yscale("log", base=2)
    scale_axes.set_ylim(scales.min() / 4, 4 * scales.max())
    scale_axes.set_title("Loss scale")
    scale_axes.legend(frameon=False)
    for axes in (loss_axes, scale_axes):
        axes.set_xlabel("step")
        axes.set_xlim(0, max(axes.get_xlim()[1], 1))
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
