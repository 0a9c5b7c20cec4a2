"""A picture for light pages and one for dark ones, each with the digest of what it was drawn from.

`NAME.png` is as it was drawn. `NAME-dark.png` is the same on a dark ground: each color of the light
theme becomes its counterpart in the dark theme, so that one color means one thing on both. Of other
colors, dark and light change places, from black on white to light on dark, and hues stay.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib import colors
from matplotlib.artist import Artist
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text

from benchmarks._images import KEY, dark_path, digest, digest_of_file, pixels
from docs.generators._draw import THEMES, WIDTH, Theme, readable

LIGHT, DARK = THEMES["light"], THEMES["dark"]
PAPER, INK = DARK.paper, DARK.ink
"""Of dark pages."""
COUNTERPARTS: Mapping[str, str] = MappingProxyType(
    {
        getattr(LIGHT, field.name): getattr(DARK, field.name)
        for field in dataclasses.fields(Theme)
        if field.name not in ("ink", "paper")
    }
)
"""Of the colors of the light theme, those of the dark one."""


def sheet(height: float) -> Figure:
    """An empty figure of the width that all have."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def save(figure: Figure, path: pathlib.Path, source: Mapping[str, Any], *, dpi: int = 200) -> None:
    """Write both pictures. The figure is dark afterwards."""
    path = pathlib.Path(path)
    readable(figure, path.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without matplotlib's version: the same report makes the same file.
    metadata = {KEY: digest(source), "Software": None}
    figure.savefig(path, dpi=dpi, metadata=metadata)
    darken(figure)
    figure.savefig(dark_path(path), dpi=dpi, metadata=metadata)


def darken_file(path: pathlib.Path) -> None:
    """Write the dark picture of one whose figure is not there, from its pixels."""
    from PIL import Image, PngImagePlugin

    turned = np.clip(turn(pixels(path) / 255), 0, 1)
    texts = PngImagePlugin.PngInfo()
    texts.add_text(KEY, digest_of_file(path))
    image = Image.fromarray(np.round(255 * turned).astype(np.uint8))
    image.save(dark_path(path), pnginfo=texts, optimize=True)


def turn(rgb: np.ndarray) -> np.ndarray:
    """Colors on a dark ground: as much of white as they hold is paper, as much of black is ink."""
    ink, paper = np.array(colors.to_rgb(INK)), np.array(colors.to_rgb(PAPER))
    white, black = rgb.min(axis=-1, keepdims=True), 1 - rgb.max(axis=-1, keepdims=True)
    return rgb - white + white * paper + black * ink


def dark(color: Any) -> tuple[float, float, float, float]:
    """One color on a dark ground."""
    rgba = np.array(colors.to_rgba(color))
    if (other := COUNTERPARTS.get(colors.to_hex(color))) is not None:
        red, green, blue = colors.to_rgb(other)
        return red, green, blue, float(rgba[3])
    red, green, blue = np.clip(turn(rgba[:3]), 0, 1).tolist()
    return red, green, blue, float(rgba[3])


def darken(figure: Figure) -> None:
    """Change every color of a figure."""
    for artist in figure.findobj():
        _darken(artist)


def _darken(artist: Artist) -> None:
    if isinstance(artist, Line2D):
        face, edge = artist.get_markerfacecolor(), artist.get_markeredgecolor()
        artist.set_color(dark(artist.get_color()))
        for given, change in (
            (face, artist.set_markerfacecolor),
            (edge, artist.set_markeredgecolor),
        ):
            if not isinstance(given, str) or given not in ("auto", "none"):
                change(dark(given))
    elif isinstance(artist, Text):
        artist.set_color(dark(artist.get_color()))
        if (box := artist.get_bbox_patch()) is not None:
            _darken(box)
    elif isinstance(artist, Patch):
        face, edge = artist.get_facecolor(), artist.get_edgecolor()
        artist.set_facecolor(dark(face))
        artist.set_edgecolor(dark(edge))
    elif isinstance(artist, Collection) and artist.get_array() is None:
        faces, edges = np.atleast_2d(artist.get_facecolor()), np.atleast_2d(artist.get_edgecolor())
        if faces.size:
            artist.set_facecolor([dark(face) for face in faces])
        if edges.size:
            artist.set_edgecolor([dark(edge) for edge in edges])
