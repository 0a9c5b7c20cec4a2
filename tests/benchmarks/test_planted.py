"""Planted bugs: their lines are there, and what is caught, what is not and what is gone is said."""

import pathlib

import pytest

from benchmarks import planted
from benchmarks.planted import CAUGHT, LINES, NOT_CAUGHT, Copy, Line, PlantingError

ADDED = Line("sums.py", "return a + b", ("return a - b", "return b + a"), ("test_sums.py",))


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    """A package with a line, and a test of it."""
    markers = 'markers = ["slow", "bits"]\n'
    files = {
        "halfstep/__init__.py": "",
        "halfstep/sums.py": "def added(a, b):\n    return a + b\n",
        "tests/test_sums.py": (
            "from halfstep.sums import added\n\n\ndef test():\n    assert added(1, 2) == 3\n"
        ),
        "pyproject.toml": f"[tool.pytest.ini_options]\n{markers}",
    }
    for name, content in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return tmp_path / "root"


def test_every_line_is_there_and_every_bug_is_a_program(tmp_path: pathlib.Path):
    copy = Copy(tmp_path)
    for line in LINES:
        content = copy.original(line)
        assert len(set(line.bugs)) == len(line.bugs)
        for bug in line.bugs:
            assert bug != line.text
            compile(content.replace(line.text, bug), line.file, "exec")
        for test in line.tests:
            file, _, name = test.partition("::")
            assert f"def {name}(" in (tmp_path / "tests" / file).read_text() or not name


def test_what_is_caught_and_what_is_not(root: pathlib.Path, tmp_path: pathlib.Path):
    before = (root / "halfstep" / "sums.py").read_text()
    rows = planted.measure([ADDED], tmp_path / "copy", root)
    found = {row["bug"]: (row["outcome"], row["by"]) for row in rows}
    assert found == {
        "return a - b": (CAUGHT, "test_sums.py::test"),
        "return b + a": (NOT_CAUGHT, None),
    }
    assert "1 of 2 bugs are caught" in planted.text({"rows": rows})
    assert (root / "halfstep" / "sums.py").read_text() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (Line("sums.py", "return a * b", ("",), ()), "must have this line once.*found: 0 times"),
        (Line("sums.py", "a", ("",), ()), "must have this line once.*found: 3 times"),
        (Line("gone.py", "a", ("",), ()), r"halfstep/gone\.py must.*found: no such file"),
        (Line("sums.py", "return a + b", ("",), ("test_gone.py",)), r"test_gone\.py did not run"),
        (Line("sums.py", "return a + b", ("(",), ("test_sums.py",)), r"test_sums\.py did not run"),
    ],
)
def test_what_cannot_be_planted(
    line: Line, message: str, root: pathlib.Path, tmp_path: pathlib.Path
):
    with pytest.raises(PlantingError, match=message):
        planted.measure([line], tmp_path / "copy", root)


def test_tests_that_fail_without_a_bug(root: pathlib.Path, tmp_path: pathlib.Path):
    (root / "halfstep" / "sums.py").write_text("def added(a, b):\n    return a + b + 1\n")
    with pytest.raises(PlantingError, match=r"::test fails without a bug"):
        planted.measure([ADDED], tmp_path / "copy", root)


def test_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    row = {"file": "sums.py", "bug": "return a - b", "by": None}

    def rows(outcome: str) -> list[dict[str, str | None]]:
        return [{**row, "outcome": outcome}]

    for outcome, status in ((CAUGHT, 0), (NOT_CAUGHT, 1)):
        monkeypatch.setattr(planted, "measure", lambda *_, o=outcome: rows(o))
        assert planted.main(["--only", "verdict"]) == status
        assert outcome in capsys.readouterr().out

    def gone(*_: object) -> None:
        raise PlantingError("it is gone")

    monkeypatch.setattr(planted, "measure", gone)
    assert planted.main([]) == 1
    assert "it is gone" in capsys.readouterr().err
