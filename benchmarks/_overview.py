"""The picture of the first screen: peak memory of two models, from `benchmarks.memory`."""

import pathlib
from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from benchmarks._figure import COLORS, GEMM, TARGET
from benchmarks._pictures import save, sheet

MODELS = (("GPT", 8), ("ViT-Base", 128))
"""Models and batches: the largest that are compiled for an H100."""
STEPS = ("f32", "by hand, bf16", "mpx, f16", "halfstep, bf16")
NAMES = {"f32": "float32"}


def plot(made: Mapping[str, Any], path: pathlib.Path) -> None:
    """Draw a bar per step, wide enough to be read on a phone."""
    figure = sheet(4.2)
    for axes, (model, batch) in zip(figure.subplots(len(MODELS), 1), MODELS, strict=True):
        peaks = {
            row["step"]: row["peak_bytes"] / 2**30
            for row in made["rows"]
            if (row["model"], row["batch"], row["target"], row["gemm"])
            == (model, batch, TARGET, GEMM)
        }
        _bars(axes, peaks)
        axes.set_title(f"{model}, batch {batch}", loc="left")
    figure.suptitle("Peak memory of a training step\non an H100 (compiled, not run)")
    save(figure, path, made)


def _bars(axes: Axes, peaks: Mapping[str, float]) -> None:
    names = [NAMES.get(step, step) for step in STEPS]
    colors = [COLORS[step] for step in STEPS]
    bars = axes.barh(names, [peaks[step] for step in STEPS], color=colors)
    axes.bar_label(bars, [f"{peaks[step]:.1f} GiB" for step in STEPS], padding=4, fontsize=11)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(peaks.values()))
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0, labelsize=11)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
