"""The benchmark of the state of loops: its command runs, and says what is wrong."""

import json
import os
import pathlib
from typing import Any

import pytest

from benchmarks import loop_state


def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "found.json"
    before = dict(os.environ)
    only = ["--row", "sum, plain", "--spelling", "scan", "--policy", "bf16", "--processes", "1"]
    assert loop_state.main([*only, "--json", str(path)]) == 0
    # Tests that come later start processes, too.
    assert dict(os.environ) == before
    said = capsys.readouterr().out
    assert "1 of 1 cases with a loop are exact, and 0 without one are measured." in said
    (case,) = json.loads(path.read_text())["cases"]
    assert {name: case[name] for name in ("row", "spelling", "policy", "verdict")} == {
        **{"row": "sum, plain", "spelling": "scan", "policy": "bf16", "verdict": "exact"}
    }
    assert set(case["errors"]) == {"state", "gradient"}
    assert loop_state.main(["--from", str(path)]) == 0
    assert capsys.readouterr().out == said


def case(verdict: str, error: float = 1e-3, bound: float = 2e-3) -> dict[str, Any]:
    errors = {"state": {"ours": error, "by_hand": 1e-4, "bound": bound}}
    named = {"row": "a", "spelling": "scan", "policy": "bf16", "verdict": verdict}
    return {**named, "worst": "state", "errors": errors}


FAILED = {**case("FAILED"), "worst": None, "text": "ValueError: no", "errors": {}}


@pytest.mark.parametrize(
    ("one", "bar"),
    [
        (case("WRONG: state", error=1e-2), "no state is wrong"),
        (FAILED, "no state is wrong"),
        (case("exact", bound=1.5), "every bound is less than 1"),
    ],
)
def test_bars(one: dict[str, Any], bar: str):
    assert loop_state.bars([case("exact"), one])[bar] is False
    assert all(loop_state.bars([case("exact"), case("measured", bound=1.5)]).values())


def test_the_table():
    cases = [case("WRONG: state", error=1e-2), case("measured"), FAILED]
    said = loop_state.text({"cases": cases})
    assert "| state    | 1.0e-02  | 1.0e-04 | 2.0e-03 | WRONG: state" in said
    assert "| state    | 1.0e-03  | 1.0e-04 |         | measured" in said
    assert "FAILED: ValueError: no" in said
    assert "0 of 2 cases with a loop are exact, and 1 without one are measured." in said


def test_the_page_counts_loops_and_lists_what_is_not_a_loop():
    without = {**case("measured"), "row": "fold", "spelling": "no loop"}
    said = loop_state.page({"cases": [case("exact"), case("WRONG: state", error=1e-2), without]})
    assert "| a Python loop over 64 terms | 1.0e-03 (1.0e-04) " in said
    assert "Of 1 loops" in said
    assert "1 of 2 are exact" in said
