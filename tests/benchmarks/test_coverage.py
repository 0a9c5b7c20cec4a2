"""What is not run is sorted by why."""

import json
import pathlib

import pytest

from benchmarks import coverage

SOURCE = """\
def check(value):
    if value < 0:
        raise ValueError(
            "negative"
        )
    try:
        return open(value)
    except OSError:
        return None


class Thing:
    def rare(self):
        return 1
"""


@pytest.fixture
def measured(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "halfstep").mkdir()
    (tmp_path / "halfstep" / "_thing.py").write_text(SOURCE)
    (tmp_path / "halfstep" / "__main__.py").write_text("import sys\n")
    files = {
        "halfstep/_thing.py": {"missing_lines": [3, 4, 8, 9, 14]},
        "halfstep/__main__.py": {"missing_lines": [1]},
    }
    totals = {
        "num_statements": 100,
        "num_branches": 20,
        "percent_covered": 95.0,
        "percent_statements_covered": 94.0,
        "percent_branches_covered": 100.0,
    }
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"files": files, "totals": totals}))
    return path


def test_reasons(measured: pathlib.Path, tmp_path: pathlib.Path):
    rows = list(coverage.left(json.loads(measured.read_text()), tmp_path))
    assert [(row["function"], row["why"], row["lines"]) for row in rows] == [
        ("module", coverage.PROCESS, 1),
        ("check", coverage.MESSAGE, 2),
        ("check", coverage.FAILURE, 2),
        ("rare", coverage.REST, 1),
    ]


def test_the_bar(measured: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture):
    options = ["--from", str(measured), "--root", str(tmp_path)]
    assert coverage.main(options) == 0
    assert "95.0 % of 120 lines and branches" in capsys.readouterr().out
    measured.write_text(measured.read_text().replace("95.0", "94.9"))
    assert coverage.main(options) == 1


def test_every_file_that_runs_elsewhere_is_there():
    assert [file for file in coverage.ELSEWHERE if not (coverage.ROOT / file).exists()] == []
