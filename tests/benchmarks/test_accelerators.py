"""The page's table of accelerators is the one that is computed with."""

import pathlib

import pytest

from benchmarks import accelerators
from halfstep._preflight import ACCELERATORS


def test_the_page_is_up_to_date():
    assert accelerators.main(["--check"]) == 0


def test_every_accelerator_has_a_row_with_its_figures():
    text = accelerators.render()
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    by_name = {cells[1]: cells[2:] for cells in rows if len(cells) > 2}
    for name in ACCELERATORS:
        assert f"`{name}`" in by_name
        assert f"- `{name}`\n    - " in text
    # The H100 of the data sheet: 80 GB, of which its driver shows 79.1 GiB; 989.4 dense TFLOP/s.
    h100 = by_name["`h100`"]
    assert h100[:4] == ["NVIDIA H100 80GB HBM3", "79.10", "59.32", "3,352"]
    assert h100[4 + accelerators.RATES.index("bfloat16")] == "989.4"
    # A TPU multiplies float32 in passes of bfloat16 and has no rate for it.
    assert by_name["`v5e`"][4] == ""


def test_a_changed_figure_is_noticed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = tmp_path / "preflight.md"
    monkeypatch.setattr(accelerators, "PAGE", page)
    page.write_text("# No marks\n")
    assert accelerators.main(["--check"]) == 1
    page.write_text(f"# Page\n\n{accelerators.BEGIN}\n{accelerators.END}\n\nThe end.\n")
    assert accelerators.main(["--check"]) == 1
    assert accelerators.main([]) == 0
    assert accelerators.main(["--check"]) == 0
    assert page.read_text().endswith(f"{accelerators.END}\n\nThe end.\n")
    page.write_text(page.read_text().replace("989.4", "1,979"))
    assert accelerators.main(["--check"]) == 1
    assert "stale: preflight.md" in capsys.readouterr().out
