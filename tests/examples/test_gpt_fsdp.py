"""The language model's script in one process; several are in `test_gpt_fsdp_killed.py`."""

import json
import math
import os
import pathlib
import signal
from typing import Any

import jax
import numpy as np
import pytest

import halfstep
from examples import _mesh, gpt_fsdp as script
from examples._text import Batches, python_library

pytestmark = pytest.mark.usefixtures("standard_promotion")
SIZES = "--steps 6 --width 64 --layers 1 --heads 2 --tokens 16 --batch 8 --text 20000 --log-every 1"


def records(out: pathlib.Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def run(out: pathlib.Path, options: str) -> None:
    script.main([*SIZES.split(), *options.split(), "--out", str(out)])


@pytest.mark.slow
def test_end_to_end(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    """Four devices, two copies of the parameters; stopped by a signal and begun again."""
    options = "--policy bf16 --fsdp 2 --save-every 2"
    run(tmp_path / "whole", f"{options} --check-every 3")
    whole = records(tmp_path / "whole")
    assert [record["step"] for record in whole] == list(range(1, 7))
    assert all(math.isfinite(record["loss"]) for record in whole)
    assert (tmp_path / "whole" / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "held-out loss" in capsys.readouterr().out

    write = script.Log.write

    def interrupts(log: Any, record: Any) -> None:
        write(log, record)
        if record["step"] == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Log, "write", interrupts)
        run(tmp_path / "parts", options)
    assert "stopped after step 3; the same command" in capsys.readouterr().out
    assert [record["step"] for record in records(tmp_path / "parts")] == [1, 2, 3]
    run(tmp_path / "parts", options)
    assert records(tmp_path / "parts") == whole
    ends = [tmp_path / name / "checkpoints" / "6" / "about" for name in ("whole", "parts")]
    for name in ("manifest.json", "data-0-of-1.json"):
        assert ends[0].joinpath(name).read_text() == ends[1].joinpath(name).read_text()


def test_rows_do_not_depend_on_the_mesh():
    text = python_library(4000)
    assert len(text) == 4000
    first = Batches(text, 17, 8, 0, _mesh.rows(_mesh.make_mesh(1)))
    second = Batches(text, 17, 8, 0, _mesh.rows(_mesh.make_mesh(4)))
    seen = []
    for _ in range(3):
        batch = next(first)
        np.testing.assert_array_equal(batch, next(second))
        seen.append(np.asarray(batch))
    assert not np.array_equal(seen[0], seen[1])
    windows = np.lib.stride_tricks.sliding_window_view(text, 17)
    assert all((windows == row).all(axis=1).any() for row in np.concatenate(seen))


def test_what_is_divided():
    mesh = _mesh.make_mesh(4)
    shapes = jax.eval_shape(
        lambda: script._gpt.init(tokens=16, width=64, layers=1, key=jax.random.key(0))
    )
    found = {
        jax.tree_util.keystr(path): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(_mesh.shard_params(shapes, mesh))
    }
    assert found["['blocks']['qkv']"] == jax.P(None, None, "fsdp")
    assert found["['embed']"] == jax.P("fsdp", None)
    assert found["['norm']"] == jax.P(None)


@pytest.mark.parametrize(
    ("options", "message"),
    [("--fsdp 3", "--fsdp must divide the 4 devices; got 3"), ("--policy f7", "2")],
)
def test_options_that_cannot_be(tmp_path: pathlib.Path, options: str, message: str):
    with pytest.raises(SystemExit, match=message):
        run(tmp_path, options)


def test_a_policy_from_a_file(tmp_path: pathlib.Path):
    path = tmp_path / "plan.toml"
    policy = halfstep.Policy(compute="bf16", stores=("store:op:dot_general=recompute",))
    policy.save(path)
    text = script.parse(["--policy", str(path)]).policy
    assert halfstep.Policy.parse(text) == policy
    assert script.Config(policy=text).label == "planned"
    step, args = script.plan_step(text, batch=2)
    assert jax.eval_shape(step, *args)[0].shape == ()
