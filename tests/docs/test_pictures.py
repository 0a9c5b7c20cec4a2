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
from docs.generators import (
    _draw,
    formats,
    islands,
    optimizers,
    policies,
    precision,
    sharding,
    shown,
    tour,
)
from docs.generators._draw import THEMES, drawn
from halfstep._preflight import ACCELERATORS

DOCS = pathlib.Path(__file__).parents[2] / "docs"
LIGHT = THEMES["light"]
MODULES = (formats, precision, islands, policies, optimizers, sharding, tour)
DRAWN: dict[str, tuple[_draw.Draw, float]] = {
    name: drawing for module in MODULES for name, drawing in module.PICTURES.items()
}


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


# Bytes per parameter.


def test_the_bars_are_what_the_page_prints():
    page = (DOCS / "optimizers.md").read_text()
    printed = re.findall(r"^((?:optax|flash)[\w., ]+?) +([\d.]+)$", page, re.M)
    rows = {name.removesuffix(", float32"): float(number) for name, number in printed}
    assert rows.keys() == optimizers.MADE.keys()
    for name, number in rows.items():
        found = optimizers.counted(optimizers.MADE[name])
        assert sum(found.values()) == pytest.approx(number, abs=6e-4), name


def test_a_part_of_a_state_that_has_no_name_is_noticed():
    with pytest.raises(ValueError, match=r"what is .*other.*\? Name it in PARTS"):
        optimizers.counted(lambda params: (params, {"other": params["w"]}))


# Which device holds what.


def test_every_device_holds_its_part():
    for name, array in sharding.placed():
        parts = sharding.held(array)
        if name.startswith("b,") or name in ("b", "loss scale"):
            assert parts == [(0, 1)] * 4
        else:
            assert parts == [(0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1)]
        sizes = {shard.data.nbytes for shard in array.addressable_shards}
        start, stop = parts[0]
        assert sizes == {round(array.nbytes * (stop - start))}


# A step of the tour.


def test_the_step_is_that_of_the_page():
    found = tour.steps()
    assert [low for _, _, low in found] == [False, True, False, True, False]
    assert found[1][1] == "products f16, sums f32"
    assert found[4] == ("gradients / 32,768", "float32", False)
    assert tour.outcomes() == {
        True: "update the model;\nafter 2,000 good\nsteps, scale x 2",
        False: "skip: all as it was;\nscale x 0.5",
    }


# Files and pages.


def marks(path: pathlib.Path) -> tuple[list[str], np.ndarray]:
    """The texts of an SVG, and all of its coordinates; without names, which are digests."""
    body = path.read_text().partition("</metadata>")[2]
    texts = re.findall(r"<!-- (.*?) -->", body)
    bare = re.sub(r'(?:id|xlink:href|clip-path)="[^"]*"|#[0-9a-f]{6}|<!--.*?-->', "", body)
    return texts, np.array(re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", bare), float)


@pytest.mark.rows(2)
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_again_it_is_the_same(name: str, tmp_path: pathlib.Path):
    """Otherwise it is stale: the library, or what draws it, has changed since."""
    draw, height = DRAWN[name]
    _draw.save(name, draw, height=height, images=tmp_path)
    for kind in THEMES:
        (new, there), (old, was) = (
            marks(folder / f"{name}-{kind}.svg") for folder in (tmp_path, _draw.IMAGES)
        )
        assert new == old, "draw it again with the command of its page"
        assert there.shape == was.shape
        np.testing.assert_allclose(there, was, atol=0.5)


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


def test_every_picture_says_what_is_seen():
    """PNG and SVG: on a page, once for light screens and once for dark, with the same words."""
    pages = {page: page.read_text() for page in DOCS.rglob("*.md")}
    found: dict[str, list[tuple[str, str]]] = {"light": [], "dark": []}
    for page, text in pages.items():
        for alt, path, only in re.findall(r"!\[([^\]]*)\]\(([^)#]+)(?:#only-(\w+))?\)", text):
            assert (page.parent / path).is_file(), f"{page.name}: {path}"
            found[only].append((re.sub(r"-(?:light|dark)\b", "", pathlib.Path(path).stem), alt))
    assert found["light"] == found["dark"]
    short = [name for name, alt in found["light"] if len(alt.split()) < 8]
    assert short == [], "say what is seen, not what it is about"
    # The first picture of the home page is an element of HTML, with its own `alt`.
    files = {re.sub(r"-(?:light|dark)\b", "", path.stem) for path in (DOCS / "images").iterdir()}
    assert files == {name for name, _ in found["light"]} | {"overview"}
    for page in (DOCS / "index.md", DOCS.parent / "README.md"):
        assert re.search(
            r'<img src="[\w/]*images/overview.png"[^>]* alt="[^"]{40,}"', page.read_text()
        )


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
