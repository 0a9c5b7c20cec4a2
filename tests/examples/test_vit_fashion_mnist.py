"""The training script from end to end, on a small set of images that the test writes."""

import functools
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import halfstep
from examples import vit_fashion_mnist as script
from examples._data import load_fashion_mnist

pytestmark = pytest.mark.usefixtures("standard_promotion")

ROOT = pathlib.Path(__file__).parents[2]
SIZES = {"patch": 4, "width": 16, "hidden": 32, "heads": 2, "blocks": 1}
STEPS, RATE = 40, 0.01
# One optimizer for each schedule, so that runs of one policy share what is compiled.
OPTIMIZERS = functools.cache(script.make_optimizer)


@pytest.fixture(autouse=True)
def shared_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "make_optimizer", OPTIMIZERS)


def arguments(data: pathlib.Path, out: pathlib.Path, options: str) -> list[str]:
    sizes = [f"--{name}={size}" for name, size in SIZES.items()]
    schedule = ["--batch=32", f"--steps={STEPS}", f"--learning-rate={RATE}"]
    return [*sizes, *schedule, f"--data={data}", f"--out={out}", *options.split()]


def records(run: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def bits(run: pathlib.Path, step: int) -> dict[str, bytes]:
    """Every array of a checkpoint as its bytes, read by Orbax alone."""
    manager = ocp.CheckpointManager((run / "checkpoints").resolve())
    restored = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))[
        "state"
    ]
    manager.close()
    return {name: np.asarray(array).tobytes() for name, array in restored.items()}


@pytest.mark.slow
def test_end_to_end(data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    script.main(arguments(data, tmp_path, "--log-every 15 --eval-every 20 --seed 3"))
    printed, shown = capsys.readouterr()
    for policy, scale in (("f32", 1), ("bf16", 1), ("f16", 2**15)):
        log = records(tmp_path / f"{policy}-seed3")
        assert [r["step"] for r in log] == [15, 20, 30, 40]
        assert ["test_accuracy" in r for r in log] == [False, True, False, True]
        assert all(math.isfinite(r["loss"]) for r in log)
        assert [r["loss_scale"] for r in log] == [scale] * 4
        assert [r["skipped"] for r in log] == [0] * 4
        assert f"{policy:>4}  seed 3  test accuracy {log[-1]['test_accuracy']:.2%}" in printed
        assert f"{policy:>4} seed 3: 100%" in shown
    assert "accuracy=" in shown
    assert "scale=32768" in shown
    assert "skipped=0" in shown
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_scale_forced_too_high_recovers(data: pathlib.Path, tmp_path: pathlib.Path):
    script.main(arguments(data, tmp_path, f"--policy f16 --log-every 1 --loss-scale {2**24}"))
    log = records(tmp_path / "f16-seed0")
    # The first steps are skipped, each halves the scale, and no loss is harmed.
    first = next(n for n, r in enumerate(log) if r["skipped"] < n + 1)
    assert 1 <= first < 20
    assert [r["loss_scale"] for r in log[:first]] == [2.0 ** (23 - n) for n in range(first)]
    assert all(math.isfinite(r["loss"]) for r in log)
    assert log[-1]["skipped"] < 20
    # Ten classes: a model that had learned nothing would be near 0.1.
    assert log[-1]["test_accuracy"] > 0.9


class Interrupted(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["--policy bf16", f"--policy f16 --microbatches 2 --loss-scale {2**20}"]
)
def test_resumed_is_uninterrupted(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, options: str
):
    # An epoch is 10 steps, so the checkpoint, the interruption and the end are in three of them.
    options += " --log-every 3 --eval-every 16 --save-every 12 --growth-period 3"
    script.main(arguments(data, tmp_path / "whole", options))
    step, calls = script.train_step, []

    def dies(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 21:
            raise Interrupted("step 21")
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(script, "train_step", dies)
        with pytest.raises(Interrupted, match="step 21"):
            script.main(arguments(data, tmp_path / "parts", options))
    (run,) = (tmp_path / "parts").iterdir()
    whole = tmp_path / "whole" / run.name
    assert [r["step"] for r in records(run)] == [3, 6, 9, 12, 15, 16, 18]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')  # A kill can cut a line in two.
    script.main(arguments(data, tmp_path / "parts", f"{options} --resume"))
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert bits(run, STEPS) == bits(whole, STEPS)
    assert bits(run, STEPS) != bits(run, 36)
    # Resuming what is finished changes nothing.
    script.main(arguments(data, tmp_path / "parts", f"{options} --resume"))
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_what_a_checkpoint_holds(data: pathlib.Path, tmp_path: pathlib.Path):
    options = "--policy f16 --save-every 40 --resume"  # Nothing to resume: from the start.
    script.main(arguments(data, tmp_path, options))
    held = bits(tmp_path / "f16-seed0", STEPS)
    assert np.frombuffer(held[".scaling.loss_scaling"], np.float32).item() == 2**15
    assert np.frombuffer(held[".scaling.counter"], np.int32).item() == STEPS
    assert np.frombuffer(held[".ledger.applied"], np.int32).item() == STEPS
    for part in (".model.head.weight", ".optimizer_state", ".ledger.skipped"):
        assert any(name.startswith(part) for name in held)
    with pytest.raises(FileExistsError, match="a checkpoint of step 40: pass --resume"):
        script.main(arguments(data, tmp_path, "--policy f16"))
    (tmp_path / "f16-seed0").rename(tmp_path / "f16-seed1")
    with pytest.raises(ValueError, match=r"options: seed=0 \(now 1\), steps=40 \(now 3\)"):
        script.main(arguments(data, tmp_path, "--policy f16 --steps 3 --seed 1 --resume"))


def test_a_hopeless_run_ends_with_advice(
    data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    made = script.initial_state

    def broken(*args: Any) -> script.State:
        """Weights that are not numbers, and 40 skips already counted of the 50 that are allowed."""
        return eqx.tree_at(
            lambda s: (s.model.head.bias, s.ledger.consecutive),
            made(*args),
            replace_fn=lambda x: x + (jnp.nan if x.ndim else 40),
        )

    monkeypatch.setattr(script, "initial_state", broken)
    with pytest.raises(halfstep.SkipLimitError, match="the loss itself was not finite"):
        script.main(arguments(data, tmp_path, "--policy bf16 --log-every 1"))
    assert [r["skipped"] for r in records(tmp_path / "bf16-seed0")] == list(range(1, 10))


def test_the_state_is_donated(data: pathlib.Path):
    images = load_fashion_mnist(data)
    config = script.Config(policy="f16", seed=0, steps=STEPS, sizes=script.Sizes(**SIZES))
    optimizer = script.make_optimizer(RATE, STEPS)
    state = script.initial_state(config, images, optimizer)
    arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    batch = images.train_images[:32], images.train_labels[:32]
    _, after = script.train_step(batch, state, optimizer, "f16", 1)
    assert all(x.is_deleted() for x in arrays)
    # Master weights and optimizer state stay in float32; the rest are counters.
    dtypes = {str(x.dtype) for x in jax.tree.leaves(after) if isinstance(x, jax.Array)}
    assert dtypes == {"float32", "int32"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "required an integer, 1 or more; got 0"),
        ("--epochs 2", "not allowed with argument"),
        ("--policy f8", "invalid choice: 'f8'"),
    ],
)
def test_options_that_cannot_be(
    data: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture,
    options: str,
    message: str,
):
    with pytest.raises(SystemExit, match="2"):
        script.main(arguments(data, tmp_path, options))
    assert message in capsys.readouterr().err


def test_no_data(tmp_path: pathlib.Path):
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        script.main(["--data", str(tmp_path)])


@pytest.mark.slow
def test_killed_and_resumed_in_other_processes(data: pathlib.Path, tmp_path: pathlib.Path):
    options = f"--policy f16 --steps 400 --save-every 40 --loss-scale {2**20} --growth-period 30"
    command = [sys.executable, "-m", "examples.vit_fashion_mnist"]

    def run(out: str, more: str = "") -> "subprocess.Popen[bytes]":
        argv = arguments(data, tmp_path / out, options + more)
        return subprocess.Popen([*command, *argv], cwd=ROOT, env=dict(os.environ))

    assert run("whole").wait(600) == 0
    killed, checkpoint = run("parts"), tmp_path / "parts" / "f16-seed0" / "checkpoints" / "120"
    deadline = time.monotonic() + 600
    while not checkpoint.exists() and killed.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    assert run("parts", " --resume").wait(600) == 0
    whole, parts = tmp_path / "whole" / "f16-seed0", tmp_path / "parts" / "f16-seed0"
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert bits(parts, 400) == bits(whole, 400)
