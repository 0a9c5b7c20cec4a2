"""The results of the benchmark of products in 8 bits: complete, and what is promised holds."""

import json
import pathlib
from typing import Any

import pytest

from benchmarks import fp8, render
from tests.benchmarks.test_fp8 import check_gathers


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return json.loads((render.RESULTS / "fp8.json").read_text())


def test_every_recipe_and_framework_is_in_the_results(result: dict[str, Any]):
    assert [row["policy"] for row in result["cosines"]] == list(fp8.FULL.policies)
    for row in result["cosines"]:
        assert set(fp8.FULL.frameworks) < set(row)
        assert row["bar"] == fp8.BARS.get(row["policy"])
    assert result["passed"]
    assert fp8.passed(result["cosines"])


def test_all_that_is_eligible_is_in_8_bits(result: dict[str, Any]):
    rows = result["products"]
    assert [(row["model"], row["recipe"], row["gemm"]) for row in rows] == [
        (program.name, recipe, gemm)
        for program, recipes in fp8.FULL.programs()
        for recipe in recipes
        for gemm in fp8.GEMMS
    ]
    for row in rows:
        # Small blocks are decoded inside XLA's kernel.
        if row["recipe"] in ("mxfp8", "nvfp4"):
            assert row["f8"] == 0
        elif row["recipe"] == "f8-row-gw":
            # Two legs of three.
            assert (row["f8"], row["eligible"]) == (3, 5)
        else:
            assert row["f8"] == row["eligible"]
            # The zeros that fill the last block of a row are multiplied, too.
            blocks = row["recipe"] == "f8-block"
            assert 1 <= row["f8_share_of_flops"] <= (1.05 if blocks else 1)
    check_gathers(rows)


def test_the_page_can_be_written(
    result: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n<!-- numbers: fp8 -->\n")
    monkeypatch.setattr(render, "DOCS", tmp_path)
    assert render.render(page.read_text()).count("\n| ") > 40
    for row in result["peer_cosines"]:
        assert f"| {row['library']} " in render.RENDERERS["fp8"](result)
