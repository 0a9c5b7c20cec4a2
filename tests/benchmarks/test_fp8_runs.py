"""The benchmarks of 8 bits: their arithmetic, the reports that are kept, and their commands."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

import halfstep
from benchmarks import _tasks, fp8_memory, fp8_outliers, fp8_training, render, training
from benchmarks._runs import Trainer
from tests.models import gpt as _gpt
from tests.preflight._compilers import need, own_cache as own_cache

pytestmark = pytest.mark.usefixtures("standard_promotion")
SIZES = {"tokens": 8, "width": 16, "layers": 1}
SCHEDULE = _tasks.Schedule(steps=20, batch=2, learning_rate=1e-2, chunk=10)


def kept(name: str) -> dict[str, Any]:
    return json.loads((render.RESULTS / f"{name}.json").read_text())


# Training.


@pytest.mark.parametrize("module", [fp8_training, fp8_outliers])
def test_the_kept_report(module: Any):
    made = kept(module.MODULE.rpartition(".")[2])
    groups = {(run["task"], run["policy"]) for run in made["runs"]}
    assert groups == {(task, name) for task in made["tasks"] for name in module.NAMES}
    for run in made["runs"]:
        assert len(run["curve"]) * made["every"] == made["tasks"][run["task"]]["steps"]
        assert run["skipped"] == 0
    summary = training.summarize(made["runs"], made["tasks"], module.NAMES, module.bar_of)
    assert made["results"] == summary["results"]
    assert summary["bars"].items() <= made["bars"].items()
    assert made["passed"] == all(made["bars"].values())


def test_bars_of_recipes():
    assert fp8_training.bar_of("f8", "final") == 0.25
    assert fp8_training.bar_of("nvfp4", "final") == 1.5
    assert fp8_training.bar_of("mxfp8", "held_out") == 0.25
    assert fp8_training.bar_of("nvfp4", "held_out") == 1
    assert fp8_training.bar_of(fp8_training.KEPT, "held_out") == 1
    assert fp8_outliers.bar_of("mxfp8", "final") == 1
    assert fp8_outliers.bar_of("nvfp4", "final") == 1
    assert fp8_outliers.bar_of("f8", "final") is None


def run(policy: str, jax_of: str, loss: float, seed: int = 0) -> dict[str, Any]:
    return {
        "task": "a task",
        "policy": policy,
        "seed": seed,
        "jax": jax_of,
        "curve": [loss] * 10,
        "held_out_loss": loss,
        "skipped": 0,
        "loss_scale": 1,
    }


def test_rows_that_are_kept_have_their_own_reference():
    old = [run("bf16", "1", 1.0), run("f8", "1", 1.1), run("nvfp4", "1", 1.2)]
    new = [run("bf16", "2", 2.0), run("nvfp4", "2", 2.02)]
    runs = training.kept(old, new, "bf16") + new
    assert [(one["policy"], one["jax"]) for one in runs] == [
        ("bf16", "1"), ("f8", "1"), ("bf16", "2"), ("nvfp4", "2"),
    ]  # fmt: skip
    tasks = {"a task": {"guessing": 9.0}}
    found = training.summarize(runs, tasks, ("bf16", "f8", "nvfp4"))["results"]
    assert [(row["policy"], row["jax"], round(row["final_percent"])) for row in found] == [
        ("bf16", "1", 0), ("bf16", "2", 0), ("f8", "1", 10), ("nvfp4", "2", 1),
    ]  # fmt: skip
    # The reference of old versions goes with the last row that is compared with it.
    assert training.kept(runs, [run("f8", "2", 2.0)], "bf16") == [new[0], new[1]]
    with pytest.raises(SystemExit, match=r"no run of bf16 on a task with JAX 3.*train bf16"):
        training.summarize([*runs, run("f8", "3", 1.0)], tasks, ("bf16", "f8", "nvfp4"))


def test_resume_needs_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Any):
    with pytest.raises(SystemExit):
        fp8_training.main(["--resume"])
    assert "give it with --json FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        fp8_outliers.main(["--only", "f9"])
    assert "invalid choice: 'f9'" in capsys.readouterr().err


@pytest.mark.slow
def test_blocks_are_in_scopes_that_the_rule_names():
    for task in fp8_training.QUICK.tasks():
        args = task.init(jax.random.key(0)), *task.batch(task.train, jnp.arange(2))
        found = halfstep.explain(task.loss, fp8_training.KEPT)(*args).operations
        reasons = [entry.reason for entry in found if entry.name == "dot_general"]
        four = [why for why in reasons if why.startswith("nvfp4")]
        eight = [why for why in reasons if why.startswith("mxfp8")]
        assert len(four) == len(eight) == 4
        assert all(why.endswith("rule scope:block1=mxfp8") for why in eight)


def rows(**percents: float) -> dict[str, Any]:
    results = [
        {"task": "a task", "policy": name.replace("_", "-"), "final_percent": value}
        for name, value in percents.items()
    ]
    return {"results": results, "bars": {"another": True}, "passed": True}


def test_recipes_that_outliers_must_spoil():
    made = fp8_outliers.with_bars(rows(bf16=0.0, f8=9.0, f8_row=5.0, f8_block=0.1))
    assert made["passed"]
    assert list(made["bars"]) == [
        "another",
        "a task, f8, final loss: at least 5.0 % above bf16",
        "a task, f8-row, final loss: at least 5.0 % above bf16",
    ]
    assert not fp8_outliers.with_bars(rows(f8=9.0, f8_row=4.9))["passed"]
    assert not fp8_outliers.with_bars(rows(f8=math.nan))["passed"]
    assert not fp8_outliers.with_bars({**rows(f8=9.0), "bars": {"another": False}})["passed"]


def test_massive_activations():
    """They change no result, and spoil what shares a scale with them."""
    keys = jax.random.split(jax.random.key(0), 2)
    linear = {"weight": jax.random.normal(keys[0], (128, 16)), "bias": jnp.ones(16)}
    x = jax.random.normal(keys[1], (16, 128))
    exact = np.asarray(_gpt.dense(linear, x))
    # Sums of the same numbers and of zeros, perhaps in another order.
    largest = float(jnp.max(jnp.abs(x) @ jnp.abs(linear["weight"])))
    tolerance = 128 * halfstep.FORMATS["f32"].eps * largest
    np.testing.assert_allclose(fp8_outliers.with_outliers(linear, x), exact, rtol=0, atol=tolerance)

    def error(policy: str) -> float:
        low = jax.jit(halfstep.autocast(fp8_outliers.with_outliers, policy))(linear, x)
        return float(np.linalg.norm(low - exact) / np.linalg.norm(exact))

    # Each factor is rounded by half of its last place at most: 2**-4 with three bits of mantissa.
    bound = 2 * 2.0**-4
    assert error("f8-block") < bound
    assert error("f8-row") > 2 * bound


def small() -> _tasks.Task:
    return fp8_outliers.spoiled(SCHEDULE, SIZES, heads=2, size=50_000, tested=4)


def test_which_products():
    """All of the layers', and no others."""
    task = small()
    args = task.init(jax.random.key(0)), *task.batch(task.train, jnp.arange(2))
    found = halfstep.explain(task.loss, "f8")(*args).totals.f8
    assert found is not None
    assert (found.count, found.total) == (4, 7)


@pytest.mark.slow
def test_a_tiny_run():
    made = Trainer(small(), "f8").run(0, tqdm(disable=True))
    assert made["losses"][-5:].mean() < made["losses"][0]
    assert (made["skipped"], math.isfinite(made["held_out_loss"])) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("module", [fp8_training, fp8_outliers])
def test_the_command(module: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    task = fp8_training.gpt(SCHEDULE, {**SIZES, "layers": 2}, heads=2, size=50_000, tested=4)
    monkeypatch.setattr(fp8_training, "QUICK", training.Plan(lambda: (task,), seeds=(0, 1)))
    monkeypatch.setattr(fp8_outliers, "QUICK", training.Plan(lambda: (small(),), seeds=(0, 1)))
    path = tmp_path / "out.json"
    assert module.main(["--quick", "--json", str(path)]) == 0
    made = json.loads(path.read_text())
    found = [(run["policy"], run["seed"]) for run in made["runs"]]
    assert found == [(name, seed) for name in module.NAMES for seed in (0, 1)]
    assert all(map(math.isfinite, (value for run in made["runs"] for value in run["curve"])))
    again = tmp_path / "again.json"
    status = module.main(["--from", str(path), "--json", str(again)])
    assert status == (0 if made["passed"] else 1)
    assert json.loads(again.read_text()) == made


# Memory.


def test_ratios_and_the_bar():
    made = fp8_memory.summarize(
        [{"policy": "f32", "peak_bytes": 2800}, {"policy": "f8", "peak_bytes": 1000}]
    )
    assert [row["ratio"] for row in made["rows"]] == [1, 2.8]
    assert made["passed"]
    short = [{"policy": "f32", "peak_bytes": 2800}, {"policy": "f8", "peak_bytes": 1001}]
    assert not fp8_memory.summarize(short)["passed"]


def test_how_far_gradients_are_apart():
    exact = [jnp.asarray([3.0, 4.0]), jnp.asarray([1.0, 0.0])]
    assert fp8_memory.gradient_row(exact, exact) == {"cosine": 1, "relative_error": 0}
    turned = [jnp.asarray([-4.0, 3.0]), jnp.asarray([1.0, 0.0])]
    row = fp8_memory.gradient_row(turned, exact)
    assert row == {"cosine": 0.5, "relative_error": pytest.approx(math.sqrt(2) / 2, abs=1e-5)}


def test_the_kept_memory():
    made = kept("fp8_memory")
    assert [row["policy"] for row in made["rows"]] == list(fp8_memory.POLICIES)
    assert fp8_memory.summarize(made["rows"]).items() <= made.items()
    exact, bf16, bf16_low, f8, f8_low = made["rows"]
    assert (exact["cosine"], exact["relative_error"]) == (1, 0)
    for plain, low in ((bf16, bf16_low), (f8, f8_low)):
        assert low["peak_bytes"] < plain["peak_bytes"]
        assert low["relative_error"] > plain["relative_error"]


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_the_memory_command(tmp_path: Any):
    need("cuda")
    path = tmp_path / "out.json"
    assert fp8_memory.main(["--quick", "--json", str(path)]) == 0
    made = json.loads(path.read_text())
    for row in made["rows"]:
        assert 0 < row["argument_bytes"] < row["peak_bytes"]
        assert sum(row["kept_bytes"].values()) > 0
    assert render.fp8_memory(made).count("\n") > len(made["rows"])
