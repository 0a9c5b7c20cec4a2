"""The short examples from end to end, on few and small images, or little text."""

import argparse
import json
import math
import pathlib
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import cnn_batchnorm, flax_nnx, haiku_mlp, moe_fp8, plain_jax
from examples._classify import normalize
from examples._data import load_fashion_mnist
from tests._jaxprs import contractions
from tests._rows import slow_unless

pytestmark = pytest.mark.usefixtures("standard_promotion")

IMAGES = {
    cnn_batchnorm: "--policy f16 --width 8",
    flax_nnx: "--policy bf16 --width 8",
    haiku_mlp: "--policy bf16 --width 80",
    plain_jax: "--policy f16 --width 80",
}


def name(script: ModuleType) -> str:
    return script.__name__.rpartition(".")[2]


def records(out: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


# On every change with batch norm and without a framework; the frameworks have suites of their own.
@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "script",
    slow_unless(IMAGES, lambda script: name(script) in ("cnn_batchnorm", "plain_jax")),
    ids=name,
)
def test_images(
    script: ModuleType, data: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture
):
    options = f"{IMAGES[script]} --steps 40 --batch 32 --log-every 1 --eval-every 40"
    script.main([*options.split(), f"--data={data}", f"--out={tmp_path}"])
    policy = options.split()[1]
    log = records(tmp_path / policy)
    assert [record["step"] for record in log] == list(range(1, 41))
    assert np.mean([record["loss"] for record in log[-5:]]) < 0.5 * log[0]["loss"]
    # Ten classes: a model that had learned nothing would be near 0.1.
    assert log[-1]["test_accuracy"] > 0.8
    printed, shown = capsys.readouterr()
    assert f"{policy:>4}  held-out accuracy {log[-1]['test_accuracy']:.2%}" in printed
    assert "100%" in shown
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_only_products_are_in_16_bits(data: pathlib.Path):
    """All that goes from step to step is float32, batch norm's statistics included."""
    images = load_fashion_mnist(data)
    options = {"policy": "f16", "seed": 0, "steps": 9, "learning_rate": 0.1, "width": 8}
    made = cnn_batchnorm.make(images, argparse.Namespace(**options, loss_scale=2.0**10))
    batch = normalize(images.train_images[:32]), jnp.asarray(images.train_labels[:32])
    arrays, static = eqx.partition(made.state, eqx.is_array)

    def step(arrays: Any, *batch: Any) -> Any:
        value, state = made.step(eqx.combine(arrays, static), *batch)
        return value, eqx.filter(state, eqx.is_array)

    _, after = jax.eval_shape(step, arrays, *batch)
    dtypes = [str(leaf.dtype) for leaf in jax.tree.leaves(after)]
    assert dtypes == [str(leaf.dtype) for leaf in jax.tree.leaves(arrays)]
    assert {dtype for dtype in dtypes if "float" in dtype} == {"float32"}
    assert set(contractions(step, arrays, *batch)) == {"float16"}


def test_options_that_cannot_be(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match="2"):
        plain_jax.main(["--policy", "f8"])
    assert "invalid choice: 'f8'" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="apt-get install dataset-fashion-mnist"):
        plain_jax.main(["--data", str(tmp_path)])


@pytest.mark.slow
def test_experts(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    sizes = "--steps 8 --width 32 --layers 1 --heads 2 --tokens 32 --batch 8 --experts 4"
    more = f"--text 20000 --log-every 1 --eval-every 8 --learning-rate 0.01 --out {tmp_path}"
    moe_fp8.main([*sizes.split(), *more.split()])
    log = records(tmp_path)
    assert [record["step"] for record in log] == list(range(1, 9))
    assert log[0]["loss"] == pytest.approx(math.log(256), rel=0.05)
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]
    assert log[-1]["test_accuracy"] > 0.05
    (load,) = log[-1]["load"]
    assert sum(load) == pytest.approx(1)
    printed = capsys.readouterr().out
    assert "held-out accuracy" in printed
    assert "Taken out of f8: nothing" in printed
    # Both products of the experts, and none of the router.
    for name in ("experts/ragged_dot_general.0", "experts/ragged_dot_general.1"):
        assert name in printed
    assert "router" not in printed
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
