"""The pictures of the docs show what the library says, in a light and in a dark variant."""

import math
import pathlib
import re
from types import MappingProxyType

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import halfstep
from docs.generators import _draw, formats, islands, policies, precision, shown
from docs.generators._draw import THEMES, drawn
from halfstep._preflight import ACCELERATORS

DOCS = pathlib.Path(__file__).parents[2] / "docs"
LIGHT = THEMES["light"]
DRAWN = (*formats.PICTURES, *precision.PICTURES, "islands", "policies")


def ends_of_lines(axes: Axes) -> dict[str, float]:
    """The last value of every line, by its label."""
    return {str(line.get_label()): float(np.asarray(line.get_ydata())[-1]) for line in axes.lines}


def bars(axes: Axes) -> list[tuple[float, float]]:
    """Begin and end of every horizontal bar."""
    found = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    return [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in found]


# Formats.


def test_the_bars_end_where_the_formats_do():
    (axes,) = drawn(formats.draw_range, LIGHT, height=3).axes
    shown = [label.get_text() for label in axes.get_yticklabels()]
    assert set(shown) == {"e2m1", "e4m3", "e5m2", "f16", "bf16", "f32"}
    ends = iter(bars(axes))
    for row in formats.formats():
        low, high = next(ends), next(ends)
        expected = [math.log10(value) for value in (row.smallest, row.tiny, row.tiny, row.max)]
        np.testing.assert_allclose([*low, *high], expected)


def test_a_format_that_is_not_there_is_not_drawn(monkeypatch: pytest.MonkeyPatch):
    without = {name: row for name, row in halfstep.FORMATS.items() if name != "f16"}
    monkeypatch.setattr(halfstep, "FORMATS", MappingProxyType(without))
    (axes,) = drawn(formats.draw_range, LIGHT, height=3).axes
    assert "f16" not in [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize(
    "row", [r for r in formats.formats() if r.bits <= 16], ids=lambda r: r.name
)
def test_numbers_and_gaps_are_those_of_the_bit_patterns(row: halfstep.Format):
    found = formats.numbers(row)
    assert (found[0], found[-1]) == (row.smallest, row.max)
    below_one = found[(found >= row.tiny) & (found < 2 * row.tiny)]
    assert len(below_one) == 2**row.mantissa_bits
    np.testing.assert_allclose(formats.gap(row, found[:-1]), np.diff(found) / found[:-1])


def test_every_number_of_few_bits_is_a_line():
    panels = drawn(formats.draw_numbers, LIGHT, height=3).axes
    few = [row for row in formats.formats() if row.bits <= 8]
    for axes, row in zip(panels, few, strict=True):
        parts = [part for part in axes.collections if isinstance(part, LineCollection)]
        lines = [segment[0, 0] for part in parts for segment in part.get_segments()]
        np.testing.assert_allclose(sorted(lines), np.log2(formats.numbers(row)))


# Where precision is lost.


def test_lines_are_what_the_formats_compute():
    (axes,) = drawn(precision.draw_swamping, LIGHT, height=3).axes
    ends = ends_of_lines(axes)
    assert ends == {"f32": 6000, "f16": 2**11, "bf16": 2**8}
    (axes,) = drawn(precision.draw_averages, LIGHT, height=3).axes
    ends = ends_of_lines(axes)
    assert ends["f32"] > 0.99
    # A move of at most half of the distance to the next number is none.
    for name, format_ in (("f16", halfstep.FORMATS["f16"]), ("bf16", halfstep.FORMATS["bf16"])):
        octave = 2.0 ** math.floor(math.log2(ends[name]))
        assert 0.9e-3 * (1 - ends[name]) <= octave * format_.eps / 2


def test_rounding_and_cancellation():
    np.testing.assert_array_equal(precision.rounded(np.array([257.0, 259.0]), "bf16"), [256, 260])
    first = precision.variance_error(64.0, "bf16", is_centered=False)
    second = precision.variance_error(64.0, "bf16", is_centered=True)
    assert second < 0.01 < 0.5 < first


def test_the_histogram_says_what_float16_loses():
    panels = drawn(precision.draw_underflow, LIGHT, height=3).axes
    found = precision.gradients()
    for axes, scale in zip(panels, (1, 2**15), strict=True):
        lost = np.mean((found * scale).astype(np.float16) == 0)
        assert f"{100 * lost:.1f} % become zero" in axes.get_title()
    assert "0.0 %" not in panels[0].get_title()


# Islands.


def test_the_island_is_the_one_that_explain_reports():
    figure = drawn(islands.draw, LIGHT, height=6)
    flow, below = figure.axes
    said = [text.get_text() for text in flow.texts]
    for entry in islands.operations():
        text = f"{entry.name}, {entry.outs[0].dtype}"
        # What is in an island is there twice: forward, and recomputed.
        again = 2 if entry.island is not None else 1
        assert said.count(text) == again * (2 if entry.is_contraction else 1)
    totals = islands.report().totals
    assert totals.stored is not None
    width = sum(end - begin for begin, end in bars(below)[-len(totals.stored) :])
    assert width == pytest.approx(sum(totals.stored.values()) / 2**20)
    assert sum("stored\nbf16, 8 MiB" in text for text in said) == 2


# Policies.


def test_the_decision_names_the_devices_that_multiply_8_bits(monkeypatch: pytest.MonkeyPatch):
    def said() -> str:
        (axes,) = drawn(policies.draw, LIGHT, height=6).axes
        return "\n".join(text.get_text() for text in axes.texts)

    names = [name for name, row in ACCELERATORS.items() if "float8" in row.peak_flops]
    assert names
    assert all(name in said() for name in names)
    assert "v5e" not in said()
    fewer = {name: row for name, row in ACCELERATORS.items() if name != "l4"}
    monkeypatch.setattr(policies, "ACCELERATORS", fewer)
    assert "l4" not in said()


# Files and pages.


def test_every_picture_is_on_a_page_for_both_kinds_of_screens():
    text = "\n".join(page.read_text() for page in DOCS.rglob("*.md"))
    shown = re.findall(
        r"!\[([^\]]*)\]\((?:\.\./)*images/([\w-]+)-(light|dark)\.svg#only-(\w+)\)", text
    )
    assert all(kind == only for _, _, kind, only in shown)
    by_kind = {
        kind: [(name, alt) for alt, name, other, _ in shown if other == kind] for kind in THEMES
    }
    assert by_kind["light"] == by_kind["dark"]
    names = [name for name, _ in by_kind["light"]]
    assert set(DRAWN) <= set(names)
    assert all(alt for _, alt in by_kind["light"])
    for name in DRAWN:
        for kind in THEMES:
            assert (_draw.IMAGES / f"{name}-{kind}.svg").is_file()


def test_pictures_are_written_in_both_themes(tmp_path: pathlib.Path):
    def draw(figure: Figure, theme: _draw.Theme) -> None:
        axes = figure.subplots()
        axes.plot([0, 1], color=theme.orange)
        _draw.bare(axes)

    _draw.save("one", draw, height=2, images=tmp_path)
    light, dark = ((tmp_path / f"one-{kind}.svg").read_text() for kind in ("light", "dark"))
    assert LIGHT.orange in light
    assert LIGHT.orange not in dark
    assert "dc:date" not in light


@pytest.mark.parametrize("name", shown.NOTEBOOKS)
def test_pictures_of_notebooks_are_what_they_show(name: str):
    kept = (DOCS / "images" / f"{name}.png").read_bytes()
    assert kept == shown.picture_of_a_notebook(shown.NOTEBOOKS[name]), (
        f"draw it again: python -m docs.generators.shown {name}"
    )
