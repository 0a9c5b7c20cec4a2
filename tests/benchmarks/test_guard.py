"""The guard of bytes: comparing two reports fails when it should."""

import copy
import json
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import pytest

from benchmarks import guard
from benchmarks._guard_programs import PROGRAMS
from benchmarks._report import versions
from tests._jaxprs import equations

COMPILERS = versions(*guard.COMPILERS)
FIGURES = {"peak_bytes": 1000, "temp_bytes": 800, "traffic_bytes": 2000, "accessed_bytes": None}
STEP = {"model": "a", "batch": 8, "target": "h100", "step": "bf16", **FIGURES}
SAME, ROUNDED = ({"group": group, **STEP} for group in ("same", "rounded"))
ROUNDED["model"] = "b"
BEFORE = {"versions": COMPILERS, "rows": [SAME, ROUNDED]}


def compared(tmp_path: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    for name, made in (("before", before), ("after", after)):
        (tmp_path / name).write_text(json.dumps(made))
    return guard.main(["--from", str(tmp_path / "after"), "--compare", str(tmp_path / "before")])


@pytest.mark.parametrize(
    ("row", "changed", "fails", "shown"),
    [
        (0, {}, False, "2 steps compared: 0 differences"),
        (0, {"peak_bytes": 1001}, True, "| peak   | 1,000  | 1,001 | +0.100% | yes "),
        (0, {"temp_bytes": 799}, True, "| temp   | 800    | 799   | -0.125% | yes "),
        (0, {"traffic_bytes": 2001}, True, "| traffic | 2,000  | 2,001 | +0.050% | yes "),
        (0, {"accessed_bytes": 1}, True, "| accessed | none   | 1     |        | yes "),
        (1, {"peak_bytes": 1005}, False, "| peak   | 1,000  | 1,005 | +0.500% | no "),
        (1, {"peak_bytes": 1006}, True, "| peak   | 1,000  | 1,006 | +0.600% | yes "),
        (1, {"traffic_bytes": 1}, False, "| traffic | 2,000  | 1     | -99.950% | no "),
        (1, {"peak_bytes": None}, True, "| peak   | 1000   | none  |        | yes "),
        (1, {"refused": "no"}, True, "| refused | none   | no    |        | yes "),
        (1, {"batch": 9}, True, "| step   | there   | missing |        | yes "),
    ],
)
def test_what_fails(row, changed, fails, shown, tmp_path, capsys: pytest.CaptureFixture):
    after: dict[str, Any] = copy.deepcopy(BEFORE)
    after["rows"][row] |= changed
    assert compared(tmp_path, BEFORE, after) == fails
    assert shown in capsys.readouterr().out


def test_a_step_that_was_added_does_not_fail(tmp_path, capsys: pytest.CaptureFixture):
    assert compared(tmp_path, {**BEFORE, "rows": [SAME]}, BEFORE) == 0
    assert "| step   | missing | there |        | no " in capsys.readouterr().out


def test_other_compilers_are_not_compared(tmp_path, capsys: pytest.CaptureFixture):
    other = {**BEFORE, "versions": {**COMPILERS, "libtpu": "0"}}
    with pytest.raises(SystemExit, match=r"^2$"):
        compared(tmp_path, other, BEFORE)
    assert "other compilers: libtpu 0 and " in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[guard.Job]:
    """The jobs that were compiled: nothing is, and the n-th takes 1000 + n bytes."""
    jobs: list[guard.Job] = []

    def compiled(job: guard.Job) -> dict[str, Any]:
        jobs.append(job)
        place = dict(zip(guard.PLACE, job.key, strict=True))
        figures = {**FIGURES, "peak_bytes": 1000 + len(jobs)}
        return {"group": job.program.group, **place, "program": guard.digest(job), **figures}

    monkeypatch.setattr(guard, "compiled", compiled)
    monkeypatch.setattr(guard, "digest", lambda job: f"program of {job.program.model.name}")
    return jobs


def test_a_file_is_compared_as_it_was(asked, tmp_path, capsys: pytest.CaptureFixture):
    path = str(tmp_path / "guard.json")
    options = ["--only", "ResNet", "--json", path]
    assert guard.main(options) == 0
    assert guard.main(["--from", path, "--compare", path]) == 0
    assert guard.main([*options, "--compare", path]) == 1
    assert "2 steps compared: 2 differences, 2 of which fail." in capsys.readouterr().out
    assert len(asked) == 4


def test_resume_keeps_rows_of_the_same_programs(asked, tmp_path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "guard.json"
    options = ["--json", str(path), "--only", "ResNet"]
    assert guard.main(options) == 0
    assert [job.target for job in asked] == ["h100", "v5e"]
    options = ["--resume", *options, "small GPT"]
    assert guard.main(options) == 0
    models = [job.program.model.name for job in asked]
    assert models == ["ResNet", "ResNet", "small GPT", "small GPT"]
    made = json.loads(path.read_text())
    assert [row["model"] for row in made["rows"]] == models
    # Rows whose programs have changed are made again.
    monkeypatch.setattr(guard, "digest", lambda job: f"{job.target} of {job.program.model.name}")
    assert guard.main(options) == 0
    assert len(asked) == 8
    path.write_text(json.dumps({**made, "versions": {**COMPILERS, "jaxlib": "0"}}))
    with pytest.raises(SystemExit, match=r"rows of the same compilers only; differs: jaxlib 0 and"):
        guard.main(options)


REMAT, DOTS, PLAIN = "remat", "remat but dots", None
POLICIES = {REMAT: None, DOTS: jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
LAYERS = {"small GPT": 1, "ViT": 2, "small BERT": 1}
"""Layers that are written out: those of the others are one body of a scan."""


@pytest.mark.parametrize("model", LAYERS)
@pytest.mark.parametrize("remat", [REMAT, DOTS, PLAIN])
@pytest.mark.usefixtures("standard_promotion")
def test_rounded_programs_are_what_they_are_called(model: str, remat: str | None):
    """Each layer is under the user's own `jax.checkpoint`, or none is and nothing is made again."""
    name = f"{model}, {remat}" if remat else model
    (program,) = (one for one in PROGRAMS if one.group == "rounded" and one.model.name == name)
    assert program.step == ("bf16" if remat else "bf16, all stored")
    arrays, rest = eqx.partition(program.model.shape(), lambda leaf: hasattr(leaf, "shape"))

    def loss(arrays: Any, *batch: Any) -> Any:
        return program.model.loss(eqx.combine(arrays, rest), *batch)

    found = [
        equation.params["policy"]
        for equation in equations(jax.make_jaxpr(loss)(arrays, *program.model.batch(1)))
        if equation.primitive.name in ("checkpoint", "remat", "remat2")
    ]
    assert found == ([POLICIES[remat]] * LAYERS[model] if remat else [])
