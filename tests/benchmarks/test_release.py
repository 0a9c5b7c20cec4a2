"""The benchmark of gradient release: its results agree with themselves, and its command runs."""

import json

import pytest

from benchmarks import release, render
from tests.preflight._compilers import need, own_cache as own_cache

RESULT = json.loads((render.RESULTS / "release.json").read_text())


def test_every_row_is_there():
    rows = [(row["model"], row["target"], row["step"]) for row in RESULT["rows"]]
    assert rows == [(runs.model.name, runs.target, s) for runs in release.FULL for s in runs.steps]


def test_release_takes_less():
    rows = {(row["model"], row["target"], row["step"]): row for row in RESULT["rows"]}
    for (model, target, step), row in rows.items():
        if step == release.RELEASED and row["peak_bytes"] is not None:
            other = rows[model, target, release.PLAIN]["peak_bytes"]
            assert other is None or row["peak_bytes"] < other


def test_models_have_the_sizes_that_they_are_called_by():
    assert release.mlp().count == 100_663_296
    assert release.llama().count == 6_738_415_616


ONE = (release.Runs(release.SMALL, "h100", 1, 16, (release.RELEASED,)),)


@pytest.mark.usefixtures("standard_promotion", "own_cache")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [ONE, release.QUICK])
def test_the_command(plan, tmp_path, capsys: pytest.CaptureFixture, monkeypatch):
    need("cuda")
    need("tpu")
    monkeypatch.setattr(release, "QUICK", plan)
    path = tmp_path / "release.json"
    made = release.main(["--quick", "--json", str(path)])
    assert json.loads(path.read_text())["rows"] == made["rows"]
    assert "residual MLP" in capsys.readouterr().out
