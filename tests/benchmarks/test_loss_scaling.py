"""The run whose loss scale is drawn, and the preflight whose roles are."""

import json
import math
import pathlib

import pytest

from benchmarks import loss_scaling, preflight_roles
from benchmarks._report import RESULTS


def check(made: dict) -> None:
    """The scale moves as `DynamicLossScaling` says, from row to row."""
    settings, good = made["settings"], 0
    for now, after in zip(made["rows"], made["rows"][1:], strict=False):
        good = 0 if now["skipped"] else good + 1
        if now["skipped"]:
            wanted = now["scale"] / settings["factor"]
        elif good == settings["period"]:
            wanted, good = min(now["scale"] * settings["factor"], settings["first_scale"]), 0
        else:
            wanted = now["scale"]
        assert after["scale"] == wanted
    assert made["skipped"] == sum(row["skipped"] for row in made["rows"])
    assert made["rows"][0]["scale"] == settings["first_scale"]


def test_the_kept_run():
    kept = json.loads((RESULTS / "loss_scaling.json").read_text())
    check(kept)
    assert kept["rows"][0]["skipped"]
    assert all(math.isfinite(row["loss"]) for row in kept["rows"])
    assert kept["rows"][-1]["loss"] < 0.5 * kept["rows"][0]["loss"]
    kept["rows"][7]["scale"] *= 2
    with pytest.raises(AssertionError):
        check(kept)


@pytest.mark.usefixtures("standard_promotion")
def test_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "out.json"
    loss_scaling.main(["--quick", "--json", str(path)])
    made = json.loads(path.read_text())
    check(made)
    assert len(made["rows"]) == loss_scaling.QUICK_STEPS
    assert f"{made['skipped']} of {loss_scaling.QUICK_STEPS} steps" in capsys.readouterr().out


def test_the_text_is_that_of_the_run():
    kept = json.loads((RESULTS / "loss_scaling.json").read_text())
    first = next(place for place, row in enumerate(kept["rows"]) if not row["skipped"])
    said = loss_scaling.text(kept)
    assert f"The first {first} steps are skipped" in said
    assert f"{kept['skipped'] - first} of them are skipped" in said


def test_the_roles_are_those_of_the_page():
    kept = json.loads((RESULTS / "preflight_roles.json").read_text())
    rows = {(row["target"], row["policy"]): row for row in kept["rows"]}
    assert set(rows) == {(t, p) for t in preflight_roles.TARGETS for p in preflight_roles.POLICIES}
    page = preflight_roles.PAGE.read_text()
    printed = rows["h100", "bf16"]
    assert f"{printed['peak_bytes'] / 2**30:.2f} GiB" in page
    assert f"temporaries{printed['memory']['temporaries'] / 2**20:13.1f} MiB" in page
    for row in rows.values():
        assert sum(row["memory"].values()) == pytest.approx(row["peak_bytes"], rel=0.03)


def test_the_step_is_that_of_the_page():
    page = preflight_roles.step_of_the_page()
    assert page["x"].shape == (16384, 1024)
    assert "report" not in page


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_roles_are_compiled():
    pytest.importorskip("jax_cuda12_plugin")
    rows = preflight_roles.measure(preflight_roles.QUICK_TARGETS, preflight_roles.QUICK_EXAMPLES)
    full, half = rows
    assert full["policy"] == "f32"
    assert half["memory"]["parameters"] == full["memory"]["parameters"]
