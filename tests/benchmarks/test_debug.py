"""What recording costs, and who finds planted faults: the figures that are kept."""

import json

import pytest

from benchmarks import debug
from benchmarks._report import RESULTS
from tests._faults import FAULTS


@pytest.fixture(scope="module")
def kept():
    return json.loads((RESULTS / "debug.json").read_text())


def test_all_faults_are_found(kept):
    assert [row["fault"] for row in kept["faults"]] == [fault.name for fault in FAULTS]
    assert all(row["is_right"] for row in kept["faults"])


def test_what_is_kept_has_all_rows(kept):
    assert [(row["model"], row["sites"]) for row in kept["costs"]] == [
        (model, sites) for model in ("ViT", "GPT") for sites in ("bare", "scopes", "ops")
    ]
    assert debug.bars(kept["costs"], kept["faults"]) == kept["bars"]


def test_bars_can_be_missed():
    row = {"model": "GPT", "sites": "scopes", "time_ratio": 1.2}
    made = debug.bars([row], [{"is_right": False}])
    assert list(made.values()) == [False, False]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_command(tmp_path):
    assert debug.main(["--quick", "--json", str(tmp_path / "made.json")]) == 0
    made = json.loads((tmp_path / "made.json").read_text())
    assert all(row["is_right"] for row in made["faults"])
    assert [row["count"] > 0 for row in made["costs"]] == [False, True, True]
