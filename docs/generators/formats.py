"""Draw the pictures of `docs/formats.md`: `python -m docs.generators.formats`.

Everything in them is computed from `halfstep.FORMATS` and from the elements of `halfstep.RECIPES`.
"""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import halfstep
from docs.generators._draw import Theme, save_all

Format = halfstep.Format


def formats() -> list[Format]:
    """What a policy can name, and what a recipe writes factors in, by the number of bits.

    float64 is left out: compared with its range, all others are a dot.
    """
    elements = {
        factor.element: factor.dtype
        for recipe in halfstep.RECIPES.values()
        for leg in recipe.legs
        for factor in leg
    }
    few = [Format(name=name, dtype=dtype, aliases=()) for name, dtype in elements.items()]
    wide = [row for row in halfstep.FORMATS.values() if row.bits <= 32]
    return sorted([*few, *wide], key=lambda row: (row.bits, row.max))


def numbers(row: Format) -> np.ndarray:
    """All positive finite numbers of a format of at most 16 bits, from its bit patterns."""
    patterns = np.arange(2 ** (row.bits - 1), dtype=np.uint16 if row.bits > 8 else np.uint8)
    with np.errstate(invalid="ignore"):  # Patterns that are not numbers.
        found = patterns.view(row.dtype).astype(np.float64)
    return np.sort(found[np.isfinite(found) & (found > 0)])


def gap(row: Format, magnitude: np.ndarray) -> np.ndarray:
    """The distance to the next number, over the number itself."""
    octave = np.maximum(2.0 ** np.floor(np.log2(magnitude)), row.tiny)
    return octave * row.eps / magnitude


def color(row: Format, theme: Theme) -> str:
    by_bits = {32: theme.ink, 16: theme.blue, 8: theme.orange}
    return by_bits.get(row.bits, theme.green)


def draw_range(figure: Figure, theme: Theme) -> None:
    """A bar from the smallest to the largest number; its left end has less and less precision."""
    axes, rows = figure.subplots(), formats()
    for place, row in enumerate(rows):
        ends = [math.log10(value) for value in (row.smallest, row.tiny, row.max)]
        shade = color(row, theme)
        axes.barh(place, ends[1] - ends[0], left=ends[0], height=0.42, color=shade, alpha=0.45)
        axes.barh(place, ends[2] - ends[1], left=ends[1], height=0.42, color=shade)
        said = f"{row.smallest:.2g} to {row.max:.3g}"
        right = ends[2] < 20
        anchor = (ends[2] if right else ends[0], place + (0 if right else 0.44))
        axes.annotate(
            said,
            anchor,
            xytext=(5 if right else 0, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
        )
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    exponents = range(-40, 41, 20)
    axes.set_xticks(
        exponents, [f"$10^{{{exponent}}}$" if exponent else "1" for exponent in exponents]
    )
    axes.set_xlim(-47, 40)
    axes.set_ylim(-0.6, len(rows) - 0.2)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("magnitude")


def draw_density(figure: Figure, theme: Theme) -> None:
    """How far apart the numbers are, in parts of the number: the lower, the more digits."""
    axes = figure.subplots()
    styles = {"f16": "--", "e5m2": "--"}
    for row in formats():
        low, high = math.log2(row.smallest), math.log2(row.max)
        magnitude = 2.0 ** np.linspace(max(low, -45), min(high, 45), 4000)
        axes.plot(
            np.log10(magnitude),
            np.log10(gap(row, magnitude)),
            color=color(row, theme),
            linestyle=styles.get(row.name, "-"),
            linewidth=1.4,
            label=row.name,
        )
    ticks = range(-8, 1, 2)
    axes.set_yticks(ticks, [f"$10^{{{tick}}}$" if tick else "1" for tick in ticks])
    exponents = range(-12, 13, 4)
    axes.set_xticks(
        exponents, [f"$10^{{{exponent}}}$" if exponent else "1" for exponent in exponents]
    )
    axes.set_xlim(-13, 13)
    axes.set_xlabel("magnitude")
    axes.set_ylabel("distance to the next number,\nas a share of the number")
    figure.legend(loc="outside upper center", ncols=3)


def draw_numbers(figure: Figure, theme: Theme) -> None:
    """Every number of the formats of 4 and 8 bits, on a logarithmic line."""
    few = [row for row in formats() if row.bits <= 8]
    panels: list[Axes] = list(figure.subplots(len(few), sharex=True))
    for axes, row in zip(panels, few, strict=True):
        found = np.log2(numbers(row))
        is_normal = found >= math.log2(row.tiny)
        for part, share in ((found[is_normal], 1.0), (found[~is_normal], 0.45)):
            axes.vlines(part, 0, 1, color=color(row, theme), alpha=share, linewidth=1.3)
        axes.set_yticks([0.5], [row.name])
        axes.set_ylim(-0.1, 1.1)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
    panels[-1].set_xticks(range(-16, 17, 4), [f"$2^{{{power}}}$" for power in range(-16, 17, 4)])
    panels[-1].set_xlabel("magnitude")


PICTURES = {
    "formats-range": (draw_range, 3.6),
    "formats-density": (draw_density, 4.0),
    "formats-numbers": (draw_numbers, 2.6),
}


def main() -> None:
    save_all(PICTURES)


if __name__ == "__main__":
    main()
