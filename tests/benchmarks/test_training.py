"""The training benchmark: its arithmetic, the report that is kept, and its command."""

import copy
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tqdm import tqdm

import halfstep
from benchmarks import _runs, _tasks, render, training

RESULT_FILE = render.RESULTS / "training.json"
TASKS = {"a task": {"guessing": 2.0}}


def run(policy: str, seed: int, loss: float, *, held_out: float | None = None) -> dict[str, Any]:
    return {
        "task": "a task",
        "policy": policy,
        "seed": seed,
        "skipped": 0,
        "last_skipped": -1,
        "loss_scale": 1.0,
        "held_out_loss": loss if held_out is None else held_out,
        "curve": [9.0] * 8 + [loss, loss],
    }


def runs() -> list[dict[str, Any]]:
    losses = {"f32": (1.0, 1.2), "bf16": (1.004, 1.206), "f16": (0.99, 1.2)}
    return [run(p, seed, loss) for p, pair in losses.items() for seed, loss in enumerate(pair)]


def test_summary():
    summary = training.summarize(runs(), TASKS)
    f32, bf16, f16 = summary["results"]
    assert f32["final_loss"] == 1.1
    assert f32["final_percent"] == 0
    # Of means, 0.5 parts in 110: not the mean of both seeds' percents, which are other numbers.
    assert bf16["final_percent"] == pytest.approx(0.5 / 1.1, abs=1e-5)
    assert bf16["final_percent_of_seeds"] == pytest.approx([0.4, 0.5], abs=1e-5)
    assert f16["held_out_percent"] == pytest.approx(-0.5 / 1.1, abs=1e-5)
    assert summary["passed"]


@pytest.mark.parametrize(
    ("index", "changed", "bar"),
    [
        (2, run("bf16", 0, 1.01, held_out=1.0), "bf16, final loss"),
        (3, run("bf16", 1, 1.206, held_out=1.3), "bf16, held-out loss"),
        (4, run("f16", 0, 0.9, held_out=1.0), "f16, final loss"),
        (4, run("f16", 0, 0.99, held_out=math.nan), "f16, held-out loss"),
    ],
)
def test_a_missed_bar(index: int, changed: dict[str, Any], bar: str):
    group = runs()
    group[index] = changed
    summary = training.summarize(group, TASKS)
    assert not summary["passed"]
    (missed,) = (name for name, met in summary["bars"].items() if not met)
    assert missed == f"a task, {bar}: within 0.5 % of f32"


def test_a_model_that_learns_nothing_is_noticed():
    summary = training.summarize(runs(), {"a task": {"guessing": 1.2}})
    (missed,) = (name for name, met in summary["bars"].items() if not met)
    assert missed == "a task: f32 learns"


def test_the_final_loss_is_of_the_last_fifth():
    assert training.final({"curve": [9, 9, 9, 9, 9, 9, 9, 9, 1, 2]}) == 1.5
    assert training.final({"curve": [9, 1]}) == 1


def test_sources_are_split_by_file(tmp_path, monkeypatch):
    for number in range(20):
        (tmp_path / f"m{number:02}.py").write_bytes(bytes([65 + number]) * 100)
    (tmp_path / "_sysconfigdata_x.py").write_bytes(b"?" * 100)
    monkeypatch.setattr(_tasks.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    train, held_out = _tasks.library_sources(1500)
    assert (len(train), len(held_out)) == (1350, 150)
    assert train.startswith(b"A" * 100 + b"B" * 100)
    assert held_out == b"J" * 100 + b"T" * 50
    assert not set(train) & set(held_out)
    with pytest.raises(SystemExit, match=r"2,700 bytes to train on .* they give 1,800 and 200"):
        _tasks.library_sources(3000)


def small() -> _tasks.Task:
    schedule = _tasks.Schedule(steps=20, batch=2, learning_rate=1e-2, chunk=10)
    sizes = {"tokens": 8, "width": 8, "layers": 1}
    return _tasks.python_sources(schedule, sizes, heads=2, size=50_000, tested=4)


def losses(trainer: _runs.Trainer, seed: int) -> np.ndarray:
    return trainer.run(seed, tqdm(disable=True))["losses"]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_a_run_is_decided_by_its_seed_and_differs_by_precision():
    task = small()
    plain = _runs.Trainer(task, "f32")
    made = {"f32": losses(plain, 0), "bf16": losses(_runs.Trainer(task, "bf16"), 0)}
    np.testing.assert_array_equal(made["f32"], losses(plain, 0))
    assert (made["bf16"] != made["f32"]).any()
    # The first loss is of the same parameters and the same batch: only roundings are between them.
    # The loss is near log(vocabulary), and each score it is of was rounded to bfloat16 once.
    np.testing.assert_allclose(
        made["bf16"][0], made["f32"][0], rtol=halfstep.FORMATS["bf16"].eps / 2
    )
    assert (made["f32"] != losses(plain, 1)).all()


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_skipped_steps_are_counted(monkeypatch):
    monkeypatch.setattr(
        _runs, "scaling_of", lambda *_: halfstep.DynamicLossScaling(2.0**24, period=1000)
    )
    made = _runs.Trainer(small(), "f16").run(0, tqdm(disable=True))
    assert made["skipped"] > 0
    assert made["loss_scale"] == 2.0 ** (24 - made["skipped"])
    # The scale is too high at first, and never again.
    assert made["last_skipped"] == made["skipped"] - 1
    assert np.isfinite(made["losses"]).all()


def check(result: dict[str, Any], seeds: int) -> None:
    """Every run is there once, and what follows from the runs does."""
    expected = [
        (task, policy, seed)
        for task in result["tasks"]
        for policy in training.POLICIES
        for seed in range(seeds)
    ]
    assert [(r["task"], r["policy"], r["seed"]) for r in result["runs"]] == expected
    for row in result["runs"]:
        assert len(row["curve"]) * training.EVERY == result["tasks"][row["task"]]["steps"]
        assert row["policy"] == "f16" or (row["skipped"], row["loss_scale"]) == (0, 1.0)
        assert (row["skipped"] > 0) == (row["last_skipped"] >= 0)
        assert math.log2(row["loss_scale"]).is_integer()
    summary = training.summarize(result["runs"], result["tasks"])
    assert {name: result[name] for name in summary} == summary
    assert "--xla_allow_excess_precision=false" in result["xla_flags"]


def test_the_kept_report():
    kept = json.loads(RESULT_FILE.read_text())
    check(kept, 3)
    assert kept["passed"]
    changed = copy.deepcopy(kept)
    changed["runs"][4]["curve"][-1] *= 1.1
    with pytest.raises(AssertionError):
        check(changed, 3)


def test_the_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a" / "picture.png"
    assert training.main(["--from", str(RESULT_FILE), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert "MISSED" not in capsys.readouterr().out


class Trainer:
    """Answers at once, a little worse in 16 bits."""

    def __init__(self, task: _tasks.Task, policy: str):
        self.task, self.loss = task, {"f32": 1.0, "bf16": 1.001, "f16": 1.01}[policy]
        self.scale = 2.0**24 if policy == "f16" else 1.0

    def runs(self, seeds: Sequence[int], bar: Any) -> list[dict[str, Any]]:
        return [self.run(seed) for seed in seeds]

    def run(self, seed: int) -> dict[str, Any]:
        return {
            "losses": np.full(self.task.schedule.steps, self.loss, np.float32),
            "skipped": 0,
            "last_skipped": -1,
            "loss_scale": self.scale,
            "held_out_loss": self.loss,
        }


def test_json_and_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "Trainer", Trainer)
    monkeypatch.setattr(training, "QUICK", training.Plan(lambda: (small(),), seeds=(0,)))
    monkeypatch.setattr("sys.argv", ["training", "--quick", "--json", "out.json"])
    assert training.main(["--quick", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    check(written, 1)
    assert written["command"] == "python -m benchmarks.training --quick --json out.json"
    (about,) = written["tasks"].values()
    assert about["sha256"] == hashlib.sha256(b"".join(_tasks.library_sources(50_000))).hexdigest()
    shown = capsys.readouterr().out
    assert "MISSED  GPT on Python's library, f16, final loss: within 0.5 % of f32" in shown
    assert "met     GPT on Python's library, bf16, held-out loss" in shown
    # Twenty steps decide nothing, but a report that missed a bar says so.
    assert training.main(["--from", str(tmp_path / "out.json")]) == 1
    assert capsys.readouterr().out == shown


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_the_command(tmp_path):
    """Both tasks for real, tiny."""
    if not _tasks.FASHION_MNIST.is_dir():
        pytest.skip("needs Fashion-MNIST: apt-get install dataset-fashion-mnist")
    file = tmp_path / "out.json"
    assert training.main(["--quick", "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    check(written, 1)
    assert [row["task"] for row in written["results"][::3]] == list(written["tasks"])
