"""Texts that nobody would write."""

import json
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from benchmarks import fuzz
from benchmarks._report import RESULTS

words = st.lists(st.sampled_from(fuzz.DICTIONARY) | st.text(max_size=5), max_size=8).map("".join)


@pytest.mark.rows(1)
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_a_text_is_right_or_an_error(target):
    # How long a text takes to make depends on what else the machine does.
    @settings(suppress_health_check=[HealthCheck.too_slow])
    @given(words)
    def check(text: str) -> None:
        fuzz.TARGETS[target](text)

    check()


def test_what_is_kept():
    kept = json.loads((RESULTS / "fuzz.json").read_text())
    assert [row["target"] for row in kept["rows"]] == list(fuzz.TARGETS)
    assert fuzz.bars(kept["rows"], fuzz.RUNS) == kept["bars"]
    assert all(kept["bars"].values())


def test_bars_can_be_missed():
    rows = [
        {"target": "policy", "executions": 5, "crashed": False},
        {"target": "rule", "executions": 10, "crashed": True},
    ]
    assert list(fuzz.bars(rows, 10).values()) == [False, False]


@pytest.mark.slow
def test_the_command(tmp_path):
    pytest.importorskip("atheris")
    command = [sys.executable, "-m", fuzz.MODULE, "--runs", "1000", "--json", str(tmp_path / "f")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
