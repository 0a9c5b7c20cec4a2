"""What recording costs, and who finds planted faults: the figures that are kept."""

import json

import pytest

from benchmarks import debug
from benchmarks._report import RESULTS
from benchmarks._searches import STAGES
from tests._faults import FAULTS

PROGRAMS = (
    "one convolution",
    "CNN with BatchNorm",
    "desktop ViT",
    "GPT, a scan over its layers",
    "GPT, layers written out",
)


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
    assert [(row["program"], row["pass"]) for row in kept["searches"]] == [
        (name, stage) for name in PROGRAMS for stage in STAGES
    ]
    assert debug.bars(kept["costs"], kept["faults"], kept["searches"]) == kept["bars"]


def test_no_search_takes_three_times_as_long_as_the_step(kept):
    assert all(row["ratio"] <= debug.SEARCH_BAR == 3 for row in kept["searches"])
    assert all(row["found_pass"] == row["pass"] for row in kept["searches"])


def test_bars_can_be_missed():
    row = {"model": "GPT", "sites": "scopes", "time_ratio": 1.2}
    slower = {"model": "ViT", "sites": "scopes", "time_ratio": 0.34}
    slow = {"program": "GPT", "pass": "forward", "found_pass": "forward", "ratio": 3.1}
    wrong = {"program": "GPT", "pass": "backward", "found_pass": "forward", "ratio": 2.0}
    made = debug.bars([row, slower], [{"is_right": False}], [slow, wrong])
    assert list(made.values()) == [False] * 5


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_command(tmp_path):
    assert debug.main(["--quick", "--json", str(tmp_path / "made.json")]) == 0
    made = json.loads((tmp_path / "made.json").read_text())
    assert all(row["is_right"] for row in made["faults"])
    assert [row["found_pass"] for row in made["searches"]] == ["forward", "backward"]
    assert [row["count"] > 0 for row in made["costs"]] == [False, True, True]
