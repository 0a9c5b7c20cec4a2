"""The bars of random programs and of other people's can be missed."""

from typing import Any

import pytest

from benchmarks import ecosystem, fuzz_programs

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
