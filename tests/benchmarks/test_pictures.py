"""Every picture belongs to a result, is not older than it, and has a dark one."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure

from benchmarks import _dots, _numbers, pictures, render
from benchmarks._images import dark_path, digest, pixels, source_of
from benchmarks._pictures import INK, PAPER, dark, save, sheet
from docs.generators._draw import THEMES


def test_every_picture_is_of_its_result():
    assert pictures.stale() == []
    assert pictures.main(["--check"]) == 0


@pytest.fixture
def copied(tmp_path: pathlib.Path, monkeypatch) -> pathlib.Path:
    """Images and results that can be changed."""
    for name, folder in (("IMAGES", pictures.IMAGES), ("RESULTS", pictures.RESULTS)):
        shutil.copytree(folder, tmp_path / name)
        monkeypatch.setattr(pictures, name, tmp_path / name)
    return tmp_path


def test_a_changed_result_is_noticed(copied: pathlib.Path, capsys: pytest.CaptureFixture):
    path = copied / "RESULTS" / "memory.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert pictures.main(["--check"]) == 0
    path.write_text(json.dumps({**json.loads(path.read_text()), "optimizer": "sgd"}))
    assert pictures.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "memory.png was drawn from something else" in said
    assert "memory-dark.png was drawn from something else" in said


def test_other_pictures_are_noticed(copied: pathlib.Path):
    images = copied / "IMAGES"
    (images / "mine.png").write_bytes((images / "memory.png").read_bytes())
    (images / "scale-dark.png").unlink()
    (images / "debug-map.png").write_bytes((images / "memory.png").read_bytes())
    assert pictures.stale() == [
        "scale-dark.png is missing",
        "debug-map-dark.png was drawn from something else than it shows now",
        "mine.png belongs to no result",
    ]
    pictures.draw("debug-map")
    assert len(pictures.stale()) == 2


@pytest.mark.rows(1)
@pytest.mark.parametrize("name", pictures.DRAWN)
def test_drawn_again_it_is_the_same(name: str, tmp_path: pathlib.Path, monkeypatch):
    """Also what draws them has not changed since; `save` looks at the sizes of all texts."""
    monkeypatch.setattr(pictures, "IMAGES", tmp_path)
    kept = pathlib.Path(pictures.__file__).parents[1] / "docs" / "images"
    pictures.draw(name)
    for path in (tmp_path / f"{name}.png", tmp_path / f"{name}-dark.png"):
        new, old = (pixels(folder / path.name).astype(float) for folder in (tmp_path, kept))
        assert new.shape == old.shape
        # Other versions of the font's renderer differ at the edges of letters.
        assert np.abs(new - old).mean() < 1, f"draw it again: python -m benchmarks.pictures {name}"


@pytest.mark.parametrize("name", [*pictures.DRAWN, *pictures.SHOWN])
def test_the_dark_one_is_dark(name: str):
    light, black = (pixels(pictures.IMAGES / f"{name}{end}.png") for end in ("", "-dark"))
    assert light.shape == black.shape
    assert np.median(light) > 200
    assert np.median(black) < 60


def test_text_that_a_phone_makes_too_small_is_refused(tmp_path: pathlib.Path):
    figure = sheet(2)
    axes = figure.add_subplot()
    axes.set_title("large enough", fontsize=9)
    save(figure, tmp_path / "picture.png", {})
    axes.set_title("tiny", fontsize=8.9)
    with pytest.raises(ValueError, match=r"cannot be read on a phone.*'tiny': 8.9 pixels"):
        save(figure, tmp_path / "picture.png", {})
    wide = Figure(figsize=(10, 2))
    wide.add_subplot()
    with pytest.raises(ValueError, match="draw the figure narrower"):
        save(wide, tmp_path / "picture.png", {})


def test_one_color_means_one_thing_on_both():
    for name in ("blue", "orange", "green", "red", "gray"):
        light, black = (getattr(theme, name) for theme in (THEMES["light"], THEMES["dark"]))
        assert to_hex(dark(light)) == black
        assert dark((*to_rgb(light), 0.25)) == (*to_rgb(black), 0.25)


def test_a_recipe_that_is_far_away_does_not_hide_the_others():
    rows = [{"final_percent": percent} for percent in (-0.1, 0.2, 0.3, 3.0)]
    assert _dots.near(rows) == rows[:3]
    assert _dots.near(rows[:3]) == rows[:3]


def test_both_are_written(tmp_path: pathlib.Path):
    figure = Figure(figsize=(4, 4))
    axes = figure.add_subplot()
    axes.plot([0, 1], color="black", marker="o", markerfacecolor="white")
    axes.fill_between([0, 1], [1, 2], color="#0072b2")
    axes.bar([0], [1], color="#d55e00")
    axes.annotate("text", (0, 0), bbox={"facecolor": "#f2f2f2"})
    path = tmp_path / "new" / "picture.png"
    save(figure, path, {"rows": [1]})
    light, black = pixels(path), pixels(dark_path(path))
    assert light.shape == black.shape
    assert np.median(light) == 255
    assert (np.median(black, axis=(0, 1)) == (0x1E, 0x21, 0x29)).all()
    # Nothing of white is left.
    assert black.min(axis=-1).max() < 0xF0
    for one in (path, dark_path(path)):
        assert source_of(one) == digest({"rows": [1]}) != digest({"rows": [2]})


def test_colors_can_be_read_on_a_dark_ground():
    def luminance(rgb):
        linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        return linear @ np.array([0.2126, 0.7152, 0.0722])

    assert dark("white")[:3] == pytest.approx(dark("#ffffff")[:3])
    paper = luminance(np.array([int(PAPER[i : i + 2], 16) / 255 for i in (1, 3, 5)]))
    assert np.round(255 * np.array(dark("black")[:3])).tolist() == [
        int(INK[i : i + 2], 16) for i in (1, 3, 5)
    ]
    for color in ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#8c6d31", "#a03c00"):
        contrast = (luminance(np.array(dark(color)[:3])) + 0.05) / (paper + 0.05)
        assert contrast > 3, color


# Numbers that are written by hand.


def test_every_number_has_a_source():
    assert _numbers.wrong(_numbers.pages()) == []


def test_a_number_without_a_source_is_found():
    page = (
        "It takes 3.5 GiB, 12 % less and 2x as long; `7 %` is code.\n"
        "<!-- numbers: memory -->\n\n9 MiB\n\n<!-- end of numbers -->\n"
        "```text\n8 %\n```\nOf 16 bits, 40 seconds and 5 times more.\n"
    )
    assert list(_numbers.found(page)) == ["3.5 GiB", "12 %", "2x", "40 seconds", "5 times more"]
    pages = {"page.md": page}
    sources = {("page.md", number): "README.md" for number in _numbers.found(page)}
    assert _numbers.wrong(pages, sources) == []
    assert len(_numbers.wrong(pages, {})) == 5
    assert "12 % is written by hand" in _numbers.wrong(pages, {})[0]
    gone = {**sources, ("page.md", "1 %"): "README.md", ("page.md", "2x"): "README.md::no such"}
    assert _numbers.wrong(pages, gone) == [
        "page.md: the source of 2x, README.md::no such, is not there",
        "page.md: 1 % has a source and is not there",
    ]


def test_render_checks_both(monkeypatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(_numbers, "pages", lambda: {"page.md": "About 3 %."})
    monkeypatch.setattr(pictures, "stale", lambda: ["mine.png belongs to no result"])
    assert render.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "page.md: 3 % is written by hand" in said
    assert "mine.png belongs to no result" in said
