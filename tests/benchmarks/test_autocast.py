"""The benchmark of autocast: its results keep their bars, and its command runs."""

import itertools
import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import autocast, render

RESULT = json.loads((render.RESULTS / "autocast.json").read_text())


def check(result: dict[str, Any], plan: autocast.Plan) -> None:
    """Every row is there once, and nothing is compared with anything but itself by chance."""
    assert [(row["layers"], row["way"]) for row in result["trace"]] == list(
        itertools.product(("scanned", "written out"), autocast.WAYS)
    )
    assert [row["program"] for row in result["programs"]] == [
        program.name for program in plan.programs()
    ]
    ways = (autocast.HAND, autocast.PLAIN, autocast.ISLANDS)
    stepped = [model.name for model in plan.stepped]
    assert [(row["model"], row["way"]) for row in result["step"]] == list(
        itertools.product(stepped, ways)
    )
    differentiated = [model.name for model, _ in plan.differentiated]
    assert [(row["model"], row["way"]) for row in result["gradient"]] == list(
        itertools.product(differentiated, ways)
    )
    for row in [*result["trace"], *result["step"], *result["gradient"]]:
        reference = autocast.BARE if "layers" in row else autocast.HAND
        if row["way"] == reference:
            assert row.get("ratio", row.get("time_ratio")) == 1
    for row in result["gradient"]:
        assert len(row["errors"]) == plan.seeds
        # Rounded to 8 bits somewhere, and not by accident twice the same way.
        assert all(0 < error < 0.1 for error in row["errors"])


def test_results_are_complete():
    check(RESULT, autocast.FULL)


def test_an_incomplete_result_is_noticed():
    for key in ("trace", "programs", "step", "gradient"):
        with pytest.raises(AssertionError):
            check({**RESULT, key: RESULT[key][:-1]}, autocast.FULL)


def test_tracing_keeps_its_bar():
    for row in RESULT["trace"]:
        if row["way"] == autocast.ISLANDS:
            assert row["ratio"] <= 1.5
    assert RESULT["deep"]["layers"] == 100
    assert RESULT["deep_seconds"] < 3


def test_steps_keep_their_bar():
    for row in RESULT["step"]:
        if row["way"] == autocast.PLAIN:
            assert row["time_ratio"] <= 1.05


def test_gradients_keep_their_bar():
    for row in RESULT["gradient"]:
        if row["way"] == autocast.ISLANDS:
            assert row["ratio"] <= 1


def test_distance():
    exact = {"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}
    assert autocast.distance(exact, exact) == 0
    assert autocast.distance({"a": jnp.array([3.0, 0.5]), "b": jnp.array(4.0)}, exact) == 0.1


@pytest.mark.slow
def test_every_run_traces_anew():
    """A loss that counts how often it is called, and a jitted function inside it."""
    calls = []

    @jax.jit
    def inner(x):
        calls.append("inner")
        return jnp.sin(x)

    def loss(x):
        calls.append("loss")
        return inner(x)

    for _ in range(2):
        trace, lower = autocast.trace_seconds(loss, [jax.ShapeDtypeStruct((), jnp.float32)])
        assert trace > 0
        assert lower > 0
    assert calls == ["loss", "inner"] * 2


def test_json_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(autocast, "measure", lambda plan: RESULT)
    monkeypatch.setattr("sys.argv", ["autocast", "--json", "out.json"])
    autocast.main(["--json", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text()) == RESULT
    assert "| written out | autocast " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_command(tmp_path):
    made = autocast.main(["--quick", "--json", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text()) == made
    check(made, autocast.QUICK)
