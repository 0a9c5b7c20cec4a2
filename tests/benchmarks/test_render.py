"""No number in the docs differs from the result it was made of."""

import json
import re

import pytest

from benchmarks import render


def test_pages_are_up_to_date():
    assert render.main(["--check"]) == 0


def test_every_result_is_shown():
    pages = "".join(path.read_text() for path in render.DOCS.rglob("*.md"))
    for path in render.RESULTS.glob("*.json"):
        assert f"<!-- numbers: {path.stem} -->" in pages


def test_a_changed_number_is_noticed(tmp_path, monkeypatch, capsys: pytest.CaptureFixture):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("# Page\n\n<!-- numbers: overhead -->\n\nThe end.\n")
    monkeypatch.setattr(render, "DOCS", page.parent)
    assert render.main(["--check"]) == 1
    assert render.main([]) == 0
    assert render.main(["--check"]) == 0
    text = page.read_text()
    row = next(r for r in json.loads((render.RESULTS / "overhead.json").read_text())["rows"])
    assert f"{row['instructions']:,}" in text
    assert text.endswith(f"{render.END}\n\nThe end.\n")
    page.write_text(text.replace(f"{row['instructions']:,}", "1"))
    assert render.main(["--check"]) == 1
    assert "stale: docs/page.md" in capsys.readouterr().out


def test_results_name_their_command_and_versions():
    for path in render.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        # A second run of one benchmark, with an option or another JAX, has a file of its own.
        module = path.stem.removesuffix("_oldest").removesuffix("_4_bits")
        assert result["command"].startswith(f"python -m benchmarks.{module} ")
        assert path.name in result["command"]
        assert {"halfstep", "jax", "python"} <= set(result["versions"])


def test_results_name_no_machine():
    for path in render.RESULTS.glob("*.json"):
        assert re.findall(r"(?<![\w.])/(?:tmp|work|home|root|Users)/", path.read_text()) == [], path
        assert {"cores", "architecture"} <= set(json.loads(path.read_text())["machine"])
