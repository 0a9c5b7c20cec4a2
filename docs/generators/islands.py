"""Draw what an island stores: `python -m docs.generators.islands`, for `what-is-stored.md`.

The operations, their dtypes, which of them are in an island, and the bytes are what
`halfstep.explain` says of one function.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import halfstep
from docs.generators._draw import Theme, arrow, bare, box, save_all

# What makes no number of its own, and is left out of the picture.
VIEWS = ("reduce_max", "max", "broadcast_in_dim", "stop_gradient")


def attend(params: Any, x: jax.Array) -> jax.Array:
    scores = x @ params["score"]
    weights = jax.nn.softmax(scores)
    return jnp.sum(weights @ params["value"])


def arguments() -> tuple[Any, ...]:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    return {"score": shape(512, 1024), "value": shape(1024, 512)}, shape(4096, 512)


def report(*, islands: bool = True) -> halfstep.ExplainReport:
    return halfstep.explain(attend, "bf16" if islands else "bf16,store:op:*=keep")(*arguments())


def operations() -> list[halfstep.ExplainEntry]:
    """From the first product to the second."""
    found = report().operations
    products = [place for place, entry in enumerate(found) if entry.is_contraction]
    between = found[products[0] : products[1] + 1]
    return [entry for entry in between if entry.name not in VIEWS]


def stored() -> dict[str, dict[str, float]]:
    """MiB kept for the backward pass by dtype: as it is written, without islands and with them."""
    plain, full = report(islands=False).totals, report().totals
    rows = {
        "float32": full.stored_float32,
        "bf16,store:op:*=keep": plain.stored,
        "bf16": full.stored,
    }
    return {
        name: {dtype: size / 2**20 for dtype, size in (row or {}).items()}
        for name, row in rows.items()
    }


def draw_flow(axes: Axes, theme: Theme) -> None:
    """Forward down the left, backward up the right, and what waits in memory between them."""
    found = operations()
    shades = {"bf16": theme.blue, "f32": theme.orange}
    left, middle, right, top = 1.3, 3.75, 6.2, 0.95 * len(found)
    place = {index: top - 0.95 * index for index in range(len(found))}
    inside = [index for index, entry in enumerate(found) if entry.island is not None]
    for x in (left, right):
        low, high = place[inside[-1]] - 0.45, place[inside[0]] + 0.45
        axes.add_patch(
            FancyBboxPatch(
                (x - 1.25, low),
                2.5,
                high - low,
                boxstyle="round,pad=0,rounding_size=0.2",
                facecolor=theme.orange,
                alpha=0.14,
                linewidth=0,
            )
        )
    for index, entry in enumerate(found):
        dtype = entry.outs[0].dtype
        text = f"{entry.name}, {dtype}"
        shade = shades[dtype]
        size, at = (2.1, 0.62), place[index]
        box(axes, (left, at), size, text, fill=shade, edge=shade, ink=theme.paper)
        if index in inside:
            box(axes, (right, at), size, text, edge=shade, line="--", ink=theme.ink)
        else:
            box(axes, (right, at), size, f"gradient, {dtype}", edge=shade, ink=theme.ink)
        if index:
            start, end = place[index - 1] - 0.31, place[index] + 0.31
            arrow(axes, (left, start), (left, end), theme.ink)
            # An island is first recomputed, downwards; then its gradient leaves it upwards.
            again = index in inside and index - 1 in inside
            arrow(
                axes, (right, start if again else end), (right, end if again else start), theme.ink
            )
    for index, name in ((inside[0] - 1, "scores"), (inside[-1], "weights")):
        kept = found[index].outs[0]
        height = place[index] - 0.475
        size = math.prod(kept.shape) * halfstep.FORMATS["bf16"].bits / 8 / 2**20
        text = f"{name}, stored\nbf16, {size:.0f} MiB"
        axes.text(
            middle,
            height,
            text,
            ha="center",
            va="center",
            fontsize=9.5,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": "none", "edgecolor": theme.blue},
        )
        arrow(axes, (left, height), (middle - 0.95, height), theme.blue)
        arrow(axes, (middle + 0.95, height), (right, height), theme.blue)
    axes.text(left, top + 0.75, "forward", ha="center", fontweight="bold")
    axes.text(right, top + 0.75, "backward", ha="center", fontweight="bold")
    axes.text(
        middle,
        (place[inside[0]] + place[inside[-1]]) / 2,
        "an island:\nnothing inside\nis stored, all of\nit is recomputed\nfor the gradient",
        ha="center",
        va="center",
        fontsize=9.5,
        color=theme.orange,
    )
    axes.set_xlim(0, 7.5)
    axes.set_ylim(place[len(found) - 1] - 0.5, top + 1.1)
    bare(axes)


def draw_bars(axes: Axes, theme: Theme) -> None:
    """What is stored altogether."""
    rows, shades = stored(), {"bf16": theme.blue, "f32": theme.orange}
    for place, sizes in enumerate(rows.values()):
        begin = 0.0
        for dtype, size in sizes.items():
            axes.barh(-place, size, left=begin, height=0.55, color=shades[dtype])
            begin += size
        axes.text(begin + 0.4, -place, f"{begin:.0f} MiB", va="center", fontsize=9.5)
    axes.set_yticks([-place for place in range(len(rows))], list(rows))
    axes.set_xlim(0, 1.2 * max(sum(sizes.values()) for sizes in rows.values()))
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("stored for the backward pass (MiB):\norange float32, blue bfloat16")


def draw(figure: Figure, theme: Theme) -> None:
    parts = figure.subfigures(2, 1, height_ratios=(3.6, 1), squeeze=False)
    above, below = parts[:, 0]
    draw_flow(above.subplots(), theme)
    draw_bars(below.subplots(), theme)


PICTURES = {"islands": (draw, 6.6)}


def main() -> None:
    save_all(PICTURES)


if __name__ == "__main__":
    main()
