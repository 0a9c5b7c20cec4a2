"""The benchmark of recipes on hardware: its table and its command."""

import json

import pytest

from benchmarks import recipes
from benchmarks._report import RESULTS
from halfstep import RECIPES
from tests.preflight._compilers import need


@pytest.fixture(scope="module")
def made() -> dict:
    return json.loads((RESULTS / "recipes.json").read_text())


def test_every_recipe_has_a_row_for_every_hardware(made):
    pairs = {(row["policy"], row["target"]) for row in made["rows"]}
    assert pairs == {(p, t) for p in (recipes.REFERENCE, *RECIPES) for t in recipes.TARGETS}


def test_every_row_is_on_the_page(made):
    text = recipes.text(made)
    for row in made["rows"]:
        assert f"| `{row['policy']}` " in text
    assert text.count("\n| ") == len(made["rows"])


@pytest.mark.parametrize(
    ("native", "said"),
    [(4, "native, 4 of 4"), (3, "native in part, 3 of 4"), (0, "decoded, 0 of 4")],
)
def test_products_are_native_decoded_or_both(native, said):
    row = {"policy": "f8", "target": "h100", "peak_bytes": 2, "traffic_bytes": 4}
    plain = {**row, "policy": recipes.REFERENCE, "native": 0, "eligible": 0}
    both = [plain, {**row, "native": native, "eligible": 4}]
    assert [line["products"] for line in recipes.lines(both, {})] == ["none", said]


def test_sizes_are_compared_on_the_same_hardware():
    rows = [
        {"policy": policy, "target": target, "native": 1, "eligible": 1}
        | {"peak_bytes": size * 2**20, "traffic_bytes": size * 2**30}
        for policy, target, size in (
            (recipes.REFERENCE, "h100", 2),
            (recipes.REFERENCE, "b200", 8),
            ("f8", "h100", 1),
            ("f8", "b200", 2),
        )
    ]
    lines = recipes.lines(rows, {"f8": "0.9"})
    assert [line["peak"] for line in lines[2:]] == ["1 MiB (0.50)", "2 MiB (0.25)"]
    assert [line["traffic"] for line in lines[2:]] == ["1.0 GiB (0.50)", "2.0 GiB (0.25)"]


@pytest.mark.slow
def test_the_command(tmp_path):
    need("cuda")
    need("tpu")
    path = tmp_path / "recipes.json"
    assert recipes.main(["--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["policy"] for row in rows] == ["bf16"] * 3 + ["f8"] * 3
