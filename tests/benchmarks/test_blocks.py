"""The benchmark of block products: its table, its bars, and its command."""

import json

import pytest

from benchmarks import blocks
from benchmarks._report import RESULTS
from tests.preflight._compilers import need


@pytest.fixture(scope="module")
def made() -> dict:
    return json.loads((RESULTS / "blocks.json").read_text())


def test_bars_follow_from_the_rows(made):
    assert blocks.bars(made["rows"]) == made["bars"]
    assert {row["policy"] for row in made["rows"]} == set(blocks.POLICIES)


def test_a_decoded_product_misses_its_bar(made):
    row = next(row for row in made["rows"] if row["native"] == row["eligible"] > 0)
    worse = [{**r, "native": r["native"] - 1} if r is row else r for r in made["rows"]]
    assert blocks.bars(worse)["native"] == made["bars"]["native"] - 1


def test_more_bytes_miss_their_bars(made):
    row = next(row for row in made["rows"] if row["policy"] != blocks.REFERENCE)
    for key, bar in (("traffic_bytes", "traffic"), ("peak_bytes", "peak")):
        counts = [
            blocks.bars([{**r, key: size} if r is row else r for r in made["rows"]])[bar]
            for size in (1, 10 * row[key])
        ]
        assert counts[0] == counts[1] + 1


def test_every_program_is_on_the_page(made):
    text = blocks.text(made)
    assert text.count("\n| ") >= len(made["rows"])
    assert all(f"| {row['model']} " in text for row in made["rows"])


@pytest.mark.slow
def test_the_command(tmp_path):
    need("cuda")
    path = tmp_path / "blocks.json"
    assert blocks.main(["--quick", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["bars"]["native"] == 2
