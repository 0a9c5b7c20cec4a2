"""Pictures for the pages, each drawn twice: for readers with a light screen and with a dark one.

A page shows them by Material's suffixes: `![...](images/NAME-light.svg#only-light)` and
`![...](images/NAME-dark.svg#only-dark)`.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.text import Text

IMAGES = pathlib.Path(__file__).parents[1] / "images"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theme:
    """Colors of a picture. The first five stay apart for color-blind readers."""

    blue: str
    orange: str
    green: str
    red: str
    gray: str
    ink: str
    """Text and axes."""
    faint: str
    """Grids and what is in the background."""
    paper: str
    """The page's own color, for text on top of colors."""


THEMES: Mapping[str, Theme] = MappingProxyType(
    {
        "light": Theme(
            blue="#0067a5",
            orange="#b45f06",
            green="#00775a",
            red="#b3261e",
            gray="#8c959f",
            ink="#24292f",
            faint="#d0d7de",
            paper="#ffffff",
        ),
        "dark": Theme(
            blue="#6cb8f0",
            orange="#f0a848",
            green="#4fcf9f",
            red="#ff8a80",
            gray="#8b93a1",
            ink="#e2e4e9",
            faint="#4a4e5a",
            paper="#1e2129",
        ),
    }
)
Draw = Callable[[Figure, Theme], None]
WIDTH = 5.0
"""Of a picture, in inches: text of 10 points has 10 pixels where the picture is 360 wide."""
PHONE, SMALLEST = 360, 9.0
"""How wide a picture is on a phone, and how high its text must be there, in pixels."""


def readable(figure: Figure, name: str) -> None:
    """Raise a `ValueError` if a text of a figure is smaller than `SMALLEST` on a phone."""
    # Labels of ticks are only there once it is laid out.
    figure.draw_without_rendering()
    scale = PHONE / (72 * figure.get_figwidth())
    texts = (each for each in figure.findobj(Text) if isinstance(each, Text) and each.get_visible())
    heights = [(text.get_text(), float(text.get_fontsize()) * scale) for text in texts]
    found = [f"{text!r}: {high:.1f} pixels" for text, high in heights if text and high < SMALLEST]
    if found:
        raise ValueError(
            f"{name} has text that cannot be read on a phone, which shows it {PHONE} pixels "
            f"wide: {', '.join(found)}. At least {SMALLEST:g} pixels are required: draw the figure "
            "narrower, or the text larger"
        )


def style(theme: Theme) -> dict[Any, Any]:
    """Matplotlib's settings for a theme; the same input gives the same file."""
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": theme.ink,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.labelcolor": theme.ink,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": theme.ink,
        "axes.titlesize": "medium",
        "figure.facecolor": "none",
        "font.size": 10.5,
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.labelcolor": theme.ink,
        "savefig.transparent": True,
        "svg.hashsalt": "halfstep",
        "text.color": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
    }


def drawn(draw: Draw, theme: Theme, *, height: float) -> Figure:
    """A picture in one theme. The width is one that can still be read on a phone."""
    with matplotlib.rc_context(style(theme)):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure, theme)
        figure.canvas.draw()
    return figure


def save(name: str, draw: Draw, *, height: float, images: pathlib.Path = IMAGES) -> None:
    """Write a picture into the images of the docs, in both themes."""
    for kind, theme in THEMES.items():
        figure = drawn(draw, theme, height=height)
        with matplotlib.rc_context(style(theme)):
            readable(figure, name)
            figure.savefig(images / f"{name}-{kind}.svg", metadata={"Date": None})


def save_all(pictures: Mapping[str, tuple[Draw, float]]) -> None:
    """Write each picture of a module: what draws it, and its height."""
    for name, (draw, height) in pictures.items():
        save(name, draw, height=height)


def bare(axes: Axes) -> None:
    """Take everything away but what is drawn."""
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def box(
    axes: Axes,
    middle: tuple[float, float],
    size: tuple[float, float],
    text: str,
    *,
    edge: str,
    ink: str,
    fill: str = "none",
    line: str = "-",
    fontsize: float = 9.5,
) -> None:
    """Draw a box with text in its middle."""
    (x, y), (width, height) = middle, size
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=fill,
            edgecolor=edge,
            linewidth=1.5,
            linestyle=line,
        )
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=fontsize, color=ink)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, color=color, shrinkA=0, shrinkB=0
        )
    )
