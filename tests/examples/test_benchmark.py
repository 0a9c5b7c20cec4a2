"""The report of `benchmarks/fashion_mnist.py`: its arithmetic, and the one that is kept."""

import copy
import json
import pathlib
from typing import Any

import pytest

from benchmarks import _report, fashion_mnist as benchmark

KEPT = pathlib.Path(benchmark.__file__).parent / "results" / "fashion_mnist.json"


def run(
    policy: str, seed: int, accuracy: float, *, skipped: int = 0, forced: bool = False
) -> dict[str, Any]:
    records = [
        {"step": 5, "loss": 2.0, "loss_scale": 4.0, "skipped": skipped},
        {"step": 10, "loss": 1.0, "loss_scale": 2.0, "skipped": skipped, "test_accuracy": accuracy},
    ]
    return {
        "policy": policy,
        "seed": seed,
        "forced": forced,
        "initial_loss_scale": 4.0,
        "test_accuracy": accuracy,
        "skipped": skipped,
        "curve": benchmark.columns(records),
    }


def runs() -> list[dict[str, Any]]:
    accuracies = {"f32": (0.80, 0.82), "bf16": (0.81, 0.819), "f16": (0.80, 0.81)}
    plain = [run(p, seed, x) for p, xs in accuracies.items() for seed, x in enumerate(xs)]
    return [*plain, run("f16", 1, 0.812, skipped=3, forced=True)]


def test_summary():
    summary = benchmark.summarize(runs())
    assert summary["policies"]["f32"]["mean"] == 81
    assert summary["policies"]["f32"]["seeds_apart_points"] == 2
    assert summary["policies"]["bf16"]["difference_to_f32_points"] == 0.45
    assert summary["policies"]["f16"]["difference_to_f32_points"] == -0.5
    assert summary["forced"]["skipped"] == 3
    assert summary["forced"]["difference_to_f32_points"] == -0.8
    assert summary["passed"]


@pytest.mark.parametrize(
    ("index", "change", "bar"),
    [
        (2, {"test_accuracy": 0.82}, "bf16 within the bar"),
        (4, {"test_accuracy": 0.79}, "f16 within the bar"),
        (6, {"test_accuracy": 0.809}, "forced scale: not below its bar"),
        (6, {"skipped": 0}, "forced scale: steps were skipped"),
        (6, {"curve": {"loss": [1.0, float("nan")], "loss_scale": [1.0]}}, "is finite"),
    ],
)
def test_a_missed_bar(index: int, change: dict[str, Any], bar: str):
    changed = copy.deepcopy(runs())
    changed[index] |= change
    summary = benchmark.summarize(changed)
    assert not summary["passed"]
    (missed,) = (name for name, met in summary["bars"].items() if not met)
    assert bar in missed


def test_columns_and_rows_are_inverse():
    records = [
        {"step": 5, "loss": 2.0, "loss_scale": 4.0, "skipped": 0},
        {"step": 10, "loss": 1.0, "loss_scale": 2.0, "skipped": 1, "test_accuracy": 0.5},
    ]
    assert benchmark.rows(benchmark.columns(records)) == records


def test_json_is_the_report():
    made = {"a": [1, 2.5, None], "b": [{"c": []}, {"c": [3]}], "d": "x"}
    text = _report.to_json(made)
    assert json.loads(text) == made
    assert '"a": [1, 2.5, null]' in text


def test_the_kept_report(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    kept = json.loads(KEPT.read_text())
    # The figures follow from the runs beside them, for three policies and three seeds.
    assert kept.items() >= benchmark.summarize(kept["runs"]).items()
    assert kept["passed"]
    assert kept["test_images"] == 10_000
    assert [len(row["test_accuracy_percent"]) for row in kept["policies"].values()] == [3, 3, 3]
    assert "--xla_allow_excess_precision=false" in kept["xla_flags"]
    assert benchmark.main(["--from", str(KEPT), "--plot", str(tmp_path / "plot.png")]) == 0
    assert f"f16 from 2**24: {kept['forced']['test_accuracy_percent']:.2f} %" in (
        capsys.readouterr().out
    )
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
