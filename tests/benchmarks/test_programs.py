"""The bars of random programs and of other people's can be missed."""

import json
import pathlib
from typing import Any

import pytest

from benchmarks import _works_with, ecosystem, fuzz_programs
from benchmarks._hardening import random_programs_text
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


def test_what_failed_runs_again(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def again(seeds: Any, *_: Any) -> dict[str, Any]:
        asked.extend(seeds)
        left = {"programs": 2, "compared": 1, "run": 0, "seconds": 0.5}
        return {**left, "outcomes": {"same": 1, "failed": 1}, "failures": [{"seed": 104}]}

    monkeypatch.setattr(fuzz_programs, "programs", again)
    first = ran(100, [{"seed": 104}, {"seed": 107}])
    first |= {"compared": 8, "outcomes": {"same": 8, "failed": 2}}
    made = fuzz_programs.mended(first, 0.1, 2)
    assert asked == [104, 107]
    assert (made["programs"], made["compared"], made["failures"]) == (10, 9, [{"seed": 104}])
    assert made["outcomes"] == {"same": 9, "failed": 1}
    assert fuzz_programs.mended(ran(100, []), 0.1, 2) == ran(100, [])


def test_random_programs_as_text():
    made = ran(100, [{"seed": 104}])
    made["outcomes"] = {"same": 6, "same, run": 2, "skipped: JAX refuses x": 1, "failed": 1}
    planted = {**PLANTED, "planted": 40, "function": 0.975, "rounding": 0.5}
    text = random_programs_text({"programs": made, "planted": [planted]})
    assert "10 programs: 10 compared" in text
    assert "1 failures" in text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["as the oracle says", "8"] in lines
    assert ["failed", "1"] in lines
    assert ["10%, forward pass", "40", "97.5%", "50.0%"] in lines


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


def test_the_page_says_what_fails_and_which_bars_are_missed():
    rows = [
        row(0, note="needs care", fault="dot_general at a.py:3 loss", share=0.5, tracing=1.25),
        row(1, f16="ValueError: no\nmore"),
        row(2, bf16_inputs="TypeError: no", inputs_run_low="TypeError: no"),
        row(3, bf16=0.03),
        row(4, inputs_run_low=False, version="1.0", jax="0.12"),
        {"name": "5", "package": "5", "failed": "not done after 600 s"},
    ]
    lines = _works_with.text({"rows": rows}).splitlines()

    def cells(name: str) -> list[str]:
        found = next(line for line in lines if line.startswith(f"| `{name}` "))
        return [cell.strip() for cell in found.strip("|").split("|")]

    assert cells("0")[1:] == [
        "1 %",
        "2 %",
        "0.1 %",
        "",
        "50 %",
        "1.2",
        "`dot_general`, `a.py:3 loss`",
    ]
    assert cells("1")[3] == "raises"
    assert cells("2")[2] == "raises"
    assert cells("4")[2] == "(2 %)"
    assert cells("5")[1] == "fails"
    assert {
        "- `0` needs care.",
        "- `1` f16: ValueError: no.",
        "- `5` fails: not done after 600 s.",
    } <= (set(lines))
    assert "- all in bf16 and f16: **missed**" in lines
    assert any("without any leeway" in line and line.endswith("**missed**") for line in lines)
    assert "With JAX 0.12: 4 1.0." in lines
    # Compared are 0, 1 and 3, of which the last is worse.
    assert "in 3 of them" in lines[0]
    assert "casting inputs in 2, and" in lines[0]


def test_a_run_is_resumed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Finished rows are kept, those without a fault are completed, failed ones tried again."""
    names = ["jax_dot_product_attention", "optax_ctc", "optax_contrastive"]
    done = row(0, name=names[0], loss=1.0, fault="here")
    begun = row(1, name=names[1], loss=1.0)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [done, begun, {"name": names[2], "failed": "so"}]}))
    asked: dict[str, Any] = {}

    def measured(name: str, package: str, seconds: int, *, fault: bool, known: Any) -> Any:
        asked[name] = known
        return {**row(2), "package": package, "name": name, "fault": "there"}

    monkeypatch.setattr(ecosystem, "measured", measured)
    ecosystem.main(["--resume", "--json", str(path), *names])
    assert asked == {names[1]: begun, names[2]: {}}
    rows = json.loads(path.read_text())["rows"]
    assert [one["fault"] for one in rows] == ["here", "there", "there"]
