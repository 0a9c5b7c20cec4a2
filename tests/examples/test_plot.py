"""What the picture is computed from."""

import pathlib

import numpy as np

from examples._plot import curve, plot_curves, smooth


def test_curve_takes_the_records_that_have_the_key():
    runs = [
        [{"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0, "test_accuracy": 0.5}],
        [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 1.0, "test_accuracy": 0.7}],
    ]
    steps, losses = curve(runs, "loss")
    assert steps.tolist() == [1, 2]
    assert losses.tolist() == [[4, 3], [5, 1]]
    steps, accuracies = curve(runs, "test_accuracy")
    assert steps.tolist() == [2]
    assert accuracies.tolist() == [[0.5], [0.7]]


def test_smooth_is_a_centered_mean():
    rows = np.array([[0.0, 3.0, 6.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert smooth(rows, 3).tolist() == [[1.5, 3, 3, 3], [1, 1, 1, 1]]
    assert smooth(rows, 1).tolist() == rows.tolist()
    bad = np.array([[1.0, np.inf, 3.0, np.nan, 5.0]])
    np.testing.assert_array_equal(smooth(bad, 3), [[1, 2, 3, 4, 5]])
    np.testing.assert_array_equal(smooth(bad, 1), [[1, np.nan, 3, np.nan, 5]])


def test_a_picture_without_any_loss_scale(tmp_path: pathlib.Path):
    run = [{"step": 1, "loss": 1.0, "loss_scale": 1.0, "skipped": 0, "test_accuracy": 0.1}]
    plot_curves({"f32": [run], "bf16": [run, run]}, tmp_path / "new" / "a.png", title="t")
    assert (tmp_path / "new" / "a.png").stat().st_size > 10_000
