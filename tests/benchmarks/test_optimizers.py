"""The benchmarks of compressed optimizers: their rows, and that their commands run."""

import json
import pathlib
from typing import Any

import equinox as eqx
import jax
import pytest
from tqdm import tqdm

import halfstep
from benchmarks import _tasks, optim_cpu, optim_training, optimizers, render, training
from tests.preflight._compilers import need, own_cache as own_cache

pytestmark = pytest.mark.usefixtures("standard_promotion")


# On a CPU.


def test_on_a_cpu(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    path = tmp_path / "optim_cpu.json"
    made = optim_cpu.main(["--rounds", "2", "--size", "256", "--json", str(path)])
    assert json.loads(path.read_text())["rows"] == made["rows"]
    assert [row["optimizer"] for row in made["rows"]] == list(optim_cpu.pairs())
    for row in made["rows"]:
        assert row["time_ratio"] > 0
        assert set(optim_cpu.COLUMNS) <= set(row)
    printed = capsys.readouterr().out
    assert all(name in printed for name in optim_cpu.COLUMNS.values())
    # A page shows it in the same way.
    assert all(f"`flash_{row['optimizer']}`" in render.optim_cpu(made) for row in made["rows"])


def test_without_rounds_nothing_is_timed():
    (row,) = optim_cpu.measure(rounds=0, shape=(256, 256), only=("sgd",))
    assert set(row) == {"optimizer", "halfstep_temporaries", "optax_temporaries"}


# By the compilers of hardware.


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled(
    every: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    need("cuda")
    need("tpu")
    steps = optimizers.steps()
    if not every:
        steps = {name: steps[name] for name in ("flash_lion",)}
        monkeypatch.setattr(optimizers, "steps", lambda: steps)
        monkeypatch.setattr(optimizers, "TARGETS", ("h100",))
        monkeypatch.setattr(optimizers, "BILLION", {"layer": (64, 64)})
    path = tmp_path / "optimizers.json"
    made = optimizers.main(["--quick", "--json", str(path)])
    assert json.loads(path.read_text())["rows"] == made["rows"]
    expected = [(name, target) for name in steps for target in optimizers.TARGETS[:2]]
    assert [(row["optimizer"], row["target"]) for row in made["rows"]] == expected
    for row in made["rows"]:
        # Arguments and results share their memory: gradients, parameters and state. A TPU's peak
        # has the program's own bytes, too, and the arrays of a quick run are not large beside them.
        if row["optimizer"] == "flash_lion" and row["target"] == "h100":
            assert 6 <= row["peak"] < 7
    assert "init of a billion parameters" in capsys.readouterr().out


def test_a_refused_step_is_said(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any, **__: Any) -> Any:
        raise halfstep.PreflightError("a\nno kernel")

    monkeypatch.setattr(type(halfstep.preflight), "__call__", refuse)
    step, make = optimizers.steps()["flash_lion"]
    row = optimizers.compile_row("flash_lion", step, make, "h100", (256, 256))
    assert row == {"optimizer": "flash_lion", "target": "h100", "refused": "no kernel"}
    assert optimizers.lines({"rows": [row]})[0]["peak"] == "refused"


RESULT = json.loads((render.RESULTS / "optimizers.json").read_text())


def test_every_row_is_in_the_results():
    rows = {(row["optimizer"], row["target"]) for row in RESULT["rows"]}
    assert rows >= {(name, target) for name in optimizers.steps() for target in optimizers.TARGETS}
    assert RESULT["shape"] == list(optimizers.SHAPE)


# In training.


def task() -> _tasks.Task:
    schedule = _tasks.Schedule(steps=20, batch=2, learning_rate=1e-2, chunk=10)
    # Matrices of 4096 elements and more, which are compressed.
    sizes = {"tokens": 8, "width": 32, "layers": 1}
    return _tasks.python_sources(schedule, sizes, heads=2, size=50_000, tested=4)


def test_models_are_prepared():
    trainer = optim_training.trainer_of(task(), optim_training.FLASH)
    model = trainer.prepared(eqx.filter(trainer.task.init(jax.random.key(0)), eqx.is_array))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model)} == {"bfloat16", "float32"}
    assert trainer.policy == "bf16"
    plain = optim_training.trainer_of(task(), optim_training.REFERENCE)
    assert plain.prepared(model) is model
    assert plain.policy == "f32"


@pytest.mark.slow
def test_training():
    made = optim_training.trainer_of(task(), optim_training.FLASH).run(0, tqdm(disable=True))
    assert made["skipped"] == 0
    assert made["losses"][-1] < made["losses"][0]


@pytest.mark.slow
def test_the_command_trains_with_both(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(training, "QUICK", training.Plan(lambda: (task(),), seeds=(0, 1)))
    path = tmp_path / "optim_training.json"
    status = optim_training.main(["--quick", "--json", str(path)])
    made = json.loads(path.read_text())
    # Twenty steps decide nothing.
    assert status == 0
    rows = [(run["policy"], run["seed"]) for run in made["runs"]]
    assert rows == [(name, seed) for name in optim_training.NAMES for seed in (0, 1)]
    assert [row["policy"] for row in made["results"]] == list(optim_training.NAMES)
    assert {key: made[key] for key in ("results", "bars", "passed")} == {
        key: value
        for key, value in training.summarize(
            made["runs"], made["tasks"], optim_training.NAMES
        ).items()
        if key in ("results", "bars", "passed")
    }
