"""The benchmark of many devices: its results agree with themselves, and its command runs."""

import dataclasses
import json
import math
import pathlib
from typing import Any

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from benchmarks import _scale_figure, _scale_steps, _scale_tables, render, scale
from tests.preflight._compilers import need, own_cache as own_cache

RESULT = json.loads((render.RESULTS / "scale.json").read_text())
ROWS: list[dict[str, Any]] = [row for row in RESULT["rows"] if row.get("collectives") is not None]
JOBS = [job for runs in scale.FULL for job in runs.jobs()]
F32, BF16, F8, RELEASE = scale.RECIPES
# XLA:TPU packs four 8-bit elements into an integer.
ITEM = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "uint32": 1}


def elements(row: dict[str, Any], *kinds: str) -> float:
    found = [c for c in row["collectives"] if c["kind"] in kinds]
    return sum(c["bytes"] / ITEM.get(c["dtype"], 4) for c in found)


# The results.


def test_rows_are_in_order_and_those_over_all_gpus_are_there():
    """What was not compiled is an empty cell on the page."""
    found = [scale.key_of(row) for row in RESULT["rows"]]
    assert found == [job.key for job in JOBS if job.key in found]
    whole = [job for job in JOBS if job.layout == _scale_steps.ALL]
    assert {job.key for job in whole if job.target.startswith("h100")} <= set(found)


def test_models_have_the_sizes_that_they_are_called_by():
    assert (scale.SMALL.count, scale.LARGE.count) == (1_107_376_128, 6_738_415_616)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(scale.key_of(row)))
def test_what_is_divided_and_what_is_sent(row: dict[str, Any]):
    shards = row["devices"] if row["layout"] == _scale_steps.ALL else _scale_steps.GROUP
    a_parameter = 12 if row["recipe"] in (F32, BF16) else 5.125
    # Vectors are whole on every device, and those of a stack may be compressed or not.
    vectors = row["parameters"] * 2e-4 * 12
    ideal = row["parameters"] * a_parameter / shards
    divided = _scale_tables.divided(row)
    assert divided is not None
    assert ideal * 0.999 <= divided <= ideal * 1.001 + vectors
    assert sum(row["memory"].values()) == pytest.approx(row["peak_bytes"], rel=0.01)
    # Layers are gathered on the way forward and back, the embedding and the head once or twice,
    # and each gradient is summed once.
    gathered, summed = elements(row, "all-gather"), elements(row, "reduce-scatter", "all-reduce")
    outer = 2 * 32_000 * RESULT["models"][row["model"]]["width"]
    layers = row["parameters"] - outer
    assert summed >= row["parameters"] * 0.99
    moved = gathered + summed + elements(row, "collective-permute")
    assert moved >= (2 * layers + row["parameters"]) * 0.99
    if row["target"].startswith("h100"):
        # Over two axes, parts are gathered before the whole.
        assert 2 * layers * 0.99 <= gathered <= (2 * row["parameters"] + outer) * 1.02


def test_bytes_sent_do_not_grow_while_one_axis_is_enough():
    for job in JOBS:
        pair = [
            row
            for row in ROWS
            if (row["model"], row["recipe"], row["layout"])
            == (job.size.name, job.recipe, job.layout)
            and row["target"] in ("h100:8", "h100:32x8")
        ]
        if len(pair) == 2:
            a, b = (_scale_tables.sent(row) for row in pair)
            assert a == pytest.approx(b, rel=0.001)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ", ".join(scale.key_of(row)))
def test_recipes_are_what_is_sent(row: dict[str, Any]):
    gathered = {c["dtype"]: c["bytes"] for c in row["collectives"] if c["kind"] == "all-gather"}
    # Not the embedding, which is looked up and not multiplied.
    most = {F32: "float32", BF16: "bfloat16"}.get(row["recipe"], "float8_e4m3fn")
    if row["target"].startswith("h100"):
        assert max(gathered, key=lambda dtype: gathered[dtype]) == most


# How things are divided.


@pytest.mark.parametrize("devices", [8, 64, 256, 1024, 4096, 8192])
@pytest.mark.parametrize("layout", [_scale_steps.ALL, _scale_steps.GROUPS])
def test_the_mesh(devices: int, layout: str):
    sizes = _scale_steps.axes(devices, layout)
    assert math.prod(sizes.values()) == devices
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )
    shards = devices if layout == _scale_steps.ALL else min(devices, _scale_steps.GROUP)
    for size in (scale.SMALL, scale.LARGE):
        for leaf in jax.tree.leaves(_scale_steps.placed(size.params(), mesh)):
            part = leaf.sharding.shard_shape(leaf.shape)
            # Vectors, also those of a stack of layers, are whole.
            assert leaf.size in (math.prod(part) * shards, math.prod(part))
            assert (leaf.size == math.prod(part)) == (leaf.size <= 32 * 4096)


def test_a_matrix_that_cannot_be_divided():
    mesh = AbstractMesh((256,), ("fsdp",), axis_types=(AxisType.Auto,))
    assert _scale_steps.spec((2, 512, 64), mesh, stacked=True) == P(None, ("fsdp",), None)
    with pytest.raises(ValueError, match=r"a matrix of \(100, 100\) cannot be divided over"):
        _scale_steps.spec((100, 100), mesh, stacked=False)


# The command.

TWO = (scale.Runs(scale.TINY, ("h100:2",), recipes=(F32, BF16)),)


def test_a_run_goes_on_where_it_ended(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "scale.json"
    asked: list[str] = []

    def compiled(job: scale.Job) -> dict[str, Any]:
        asked.append(job.recipe)
        if asked == [F32, BF16]:
            raise KeyboardInterrupt("ended")
        names = zip(("model", "target", "layout", "recipe"), job.key, strict=True)
        return {**dict(names), "number": len(asked)}

    monkeypatch.setattr(scale, "compiled", compiled)
    with pytest.raises(KeyboardInterrupt, match="ended"):
        scale.measure(TWO, path=path)
    assert [row["recipe"] for row in json.loads(path.read_text())["rows"]] == [F32]
    assert [row["number"] for row in scale.measure(TWO, path=path)["rows"]] == [1, 3]
    # Nothing is left to do, unless it is asked for.
    scale.measure(TWO, path=path)
    made = scale.measure(TWO, path=path, only=[BF16, "h100", "2 devices"], fresh=True)
    assert [row["number"] for row in made["rows"]] == [1, 4]
    assert json.loads(path.read_text())["rows"] == made["rows"]
    assert asked == [F32, BF16, BF16, BF16]


def test_rows_of_two_compilers_are_not_mixed(tmp_path: pathlib.Path):
    path = tmp_path / "scale.json"
    scale.save({**RESULT, "versions": {**RESULT["versions"], "jaxlib": "0.0.1"}}, path)
    with pytest.raises(SystemExit, match=r"with other versions of .*jaxlib.*--fresh"):
        scale.measure(TWO, path=path)


def test_the_picture(tmp_path: pathlib.Path):
    _scale_figure.plot(RESULT, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


ONE = (scale.Runs(scale.TINY, ("h100:2",), recipes=(F32,)),)


@pytest.mark.usefixtures("standard_promotion", "own_cache")
@pytest.mark.slow
@pytest.mark.parametrize("plan", [ONE, scale.QUICK])
def test_the_command(
    plan: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture, monkeypatch: Any
):
    need("cuda")
    monkeypatch.setattr(scale, "QUICK", plan)
    path = tmp_path / "scale.json"
    made = scale.main(["--quick", "--json", str(path)])
    assert json.loads(path.read_text()) == json.loads(scale.to_json(made))
    assert "| tiny" in capsys.readouterr().out
    first = made["rows"][0]
    assert first["fits"]
    assert first["parameters"] == scale.TINY.count
    assert dataclasses.asdict(scale.TINY) == made["models"]["tiny"]
    assert elements(first, "reduce-scatter", "all-reduce") >= scale.TINY.count * 0.99
