"""`examples/live_view.py`, on small files."""

import json
import pathlib

import pytest

from examples import live_view
from tests.examples.test_data import write_fashion


@pytest.mark.usefixtures("standard_promotion")
def test_it_trains_and_draws(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    write_fashion(tmp_path)
    sizes = ["--steps", "20", "--batch", "2", "--hidden", "8"]
    live_view.main([*sizes, "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert "steps 0 to 19, 20 updates" in printed.out
    assert "| scale 2^" in printed.err
    assert (tmp_path / "out" / "live.png").read_bytes().startswith(b"\x89PNG")
    kept = json.loads((tmp_path / "out" / "live.json").read_text())
    assert list(kept["latest"]) == [
        *("loss", "loss_scale", "skipped", "skipped_in_a_row", "underflow", "overflow")
    ]
    # It began with 1 and has grown once.
    assert kept["latest"]["loss_scale"] == 2
