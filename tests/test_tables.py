"""Tables for people: figures, and columns that fit on the terminal."""

import io

import pytest

from halfstep._base.display import aligned, number_of, shortened

ROWS = [["operation", "why", "runs"], ["dot_general", "a contraction, at the compute dtype", "12"]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [200, 60, 40])
def test_a_table_is_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch):
    whole = aligned(ROWS, [False, False, True])
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = aligned(ROWS, [False, False, True]).splitlines()
    assert max(map(len, lines)) == min(columns, max(map(len, whole.splitlines())))
    # Numbers are never cut, nor is the narrower column of text while the other is wider.
    assert lines[1].startswith("dot_general  a contraction")
    assert lines[1].endswith(" 12")


def test_columns_stay_readable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "10")
    assert aligned(ROWS, [False, False, True]).splitlines()[1] == "dot_general  a contract..    12"


def test_nothing_is_cut_in_a_pipe(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert ROWS[1][1] in aligned(ROWS, [False, False, True])


def test_counts_and_cuts():
    assert [number_of(n, "site") for n in (0, 1, 1200)] == ["0 sites", "1 site", "1,200 sites"]
    assert [shortened("float32", width) for width in (7, 6)] == ["float32", "floa.."]
