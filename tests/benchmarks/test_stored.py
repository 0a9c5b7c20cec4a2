"""What is stored: the benchmark compares each step with casts by hand."""

import json

import jax
import pytest

from benchmarks import guard, stored
from benchmarks._report import versions

HAND = {"model": "GPT", "batch": 8, "target": "h100", "step": "by hand"}
FIGURES = {"peak_bytes": 2**30, "traffic_bytes": 2**31, "flops": 10**12}


def test_a_step_is_compared_with_its_own_by_hand(tmp_path, capsys: pytest.CaptureFixture):
    half = {name: size // 2 for name, size in FIGURES.items()}
    rows = [{**HAND, **FIGURES}, {**HAND, "step": "bf16", **half}]
    (tmp_path / "made").write_text(
        json.dumps({"versions": versions(*guard.COMPILERS), "rows": rows})
    )
    assert stored.main(["--from", str(tmp_path / "made")]) == 0
    said = capsys.readouterr().out
    assert "512" in said
    assert "4,450 / 80.4" in said
    assert said.count(" 0.500 ") == 4, said


def test_each_step_is_made_by_hand_as_well():
    keys = {job.key for job in guard.jobs(stored.programs())}
    ours = {key for key in keys if stored.HAND not in key[-1]}
    assert {(*key[:-1], key[-1].replace("bf16", stored.HAND)) for key in ours} == keys - ours
    assert {key[:1] + key[2:3] for key in ours} >= set(stored.GOALS)


def test_spellings_compute_the_same():
    models = stored.spellings({"tokens": 6, "heads": 4, "keys": 2, "size": 3})
    assert len(models) == len({model.name for model in models}) == 24
    key = jax.random.key(0)
    x = jax.random.normal(key, models[0].batch(2)[0].shape)
    found = {model.name: float(model.loss(model.init(key), x)) for model in models}
    values = {
        masked: [value for name, value in found.items() if ("no mask" not in name) == masked]
        for masked in (False, True)
    }
    assert list(map(len, values.values())) == [6, 18]
    for same in values.values():
        assert same == pytest.approx([same[0]] * len(same), rel=1e-5)
    assert values[True][0] != pytest.approx(values[False][0], rel=1e-2)
