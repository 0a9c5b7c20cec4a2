"""The bars of random programs and of other people's can be missed."""

import json
import pathlib
from typing import Any

import pytest

from benchmarks import ecosystem, fuzz_programs
from benchmarks._report import report

RAN: dict[str, Any] = {"programs": 100, "compared": 95, "failures": []}
PLANTED = {"error": "10%", "in": "forward", "function": 1.0}


def test_random_programs_keep_their_bars():
    assert all(fuzz_programs.bars({"programs": RAN, "planted": [PLANTED]}).values())


@pytest.mark.parametrize(
    ("ran", "planted"),
    [
        ({"failures": [{"seed": 1}]}, {}),
        ({"compared": 80}, {}),
        ({"programs": 0, "compared": 0}, {}),
        ({}, {"function": 0.9}),
        ({}, {"error": "1%", "function": 0.5}),
    ],
)
def test_random_programs_miss_a_bar(ran: dict[str, Any], planted: dict[str, Any]):
    results = {"programs": {**RAN, **ran}, "planted": [{**PLANTED, **planted}]}
    assert list(fuzz_programs.bars(results).values()).count(False) == 1


def ran(first: int, failures: list[dict[str, Any]]) -> dict[str, Any]:
    outcomes = {"same": 7, "same, run": 3}
    counts = {"programs": 10, "compared": 10, "run": 3, "seconds": 1.5}
    return {"first_seed": first, **counts, "outcomes": outcomes, "failures": failures}


def test_a_run_that_was_stopped_goes_on():
    both = fuzz_programs.added(ran(100, []), ran(110, [{"seed": 112}]))
    assert both == {
        "first_seed": 100,
        "programs": 20,
        "compared": 20,
        "run": 6,
        "seconds": 3.0,
        "outcomes": {"same": 14, "same, run": 6},
        "failures": [{"seed": 112}],
    }
    with pytest.raises(ValueError, match="must begin at seed 110; got 120"):
        fuzz_programs.added(ran(100, []), ran(120, []))


def test_a_run_of_other_versions_does_not_go_on(tmp_path: pathlib.Path):
    file = tmp_path / "run.json"
    assert fuzz_programs.earlier(str(file), 100) is None
    saved = report("a", {"programs": ran(100, []), "planted": []}, packages=())
    file.write_text(json.dumps(saved))
    assert fuzz_programs.earlier(str(file), 100) == {"programs": ran(100, []), "planted": []}
    with pytest.raises(SystemExit, match="begin at seed 200 to be resumed; got seed 100"):
        fuzz_programs.earlier(str(file), 200)
    saved["versions"]["jax"] = "0.1"
    file.write_text(json.dumps(saved))
    with pytest.raises(SystemExit, match=r"\(then, now\) \{'jax': \('0.1', "):
        fuzz_programs.earlier(str(file), 100)


def row(number: int, **figures: Any) -> dict[str, Any]:
    usual = {"bf16": 0.01, "bf16_inputs": 0.02, "inputs_run_low": True, "f16": 0.001}
    return {"name": str(number), "package": str(number % 25), **usual, **figures}


def test_other_people_s_programs_keep_their_bars():
    assert all(ecosystem.bars([row(number) for number in range(45)]).values())


@pytest.mark.parametrize(
    "figures",
    [
        {"f16": "ValueError: no"},
        {"bf16": 0.03},
        {"inputs_run_low": False},
        {"package": "one"},
    ],
)
def test_other_people_s_programs_miss_a_bar(figures: dict[str, Any]):
    made = ecosystem.bars([row(number, **figures) for number in range(45)])
    assert list(made.values()).count(False) == 1
