"""Tables for people: figures, and columns that fit on the terminal."""

import io

import pytest

from halfstep._text import aligned, number_of, shortened, wrapped

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


WIDE = [
    ["target", "step", "fits", "peak", "usable", "headroom", "traffic", "time bound", "in"],
    ["rtx4070", "bf16", "yes", *["59.32 GiB"] * 4, ">= 0.0616 ns (compute)", "bfloat16 100 %"],
]
NUMBERS = [False] * 3 + [True] * 5 + [False]


def test_columns_that_do_not_fit_go_below(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "80")
    above, below = aligned(WIDE, NUMBERS, keys=2).split("\n\n")
    lines = [*above.splitlines(), *below.splitlines()]
    assert max(map(len, lines)) <= 80
    # The columns that name a row are repeated, and nothing is cut.
    assert [line[:14].split() for line in lines] == [["target", "step"], ["rtx4070", "bf16"]] * 2
    assert {*" ".join(lines).split()} == {*" ".join([*WIDE[0], *WIDE[1]]).split()}
    monkeypatch.setenv("COLUMNS", "200")
    assert len(aligned(WIDE, NUMBERS, keys=2).splitlines()) == 2
    # Too narrow even for one more column: nothing is repeated, and the terminal breaks the lines.
    monkeypatch.setenv("COLUMNS", "16")
    assert len(aligned(WIDE, NUMBERS, keys=2).splitlines()) == 2


def test_the_columns_that_name_a_row_are_never_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "60")
    rows = [["layers/0/attention/query/kernel", "a reason that is somewhat longer", "1,234"]]
    line = aligned(rows, [False, False, True])
    assert line.startswith("layers/0/attention/query/kernel  a reason")
    assert len(line) == 60


def test_tables_of_text_are_wrapped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    rows = [["tested with", "JAX 0.10.2 (Python 3.11), 0.11.2 (Python 3.12)"], ["machine", "Linux"]]
    assert aligned(rows, [False, False]).splitlines() == [
        "tested with  JAX 0.10.2 (Python 3.11),",
        "             0.11.2 (Python 3.12)",
        "machine      Linux",
    ]


def test_sentences_are_wrapped(monkeypatch: pytest.MonkeyPatch):
    text = "4 operations are left out;\n  an indented line that is long"
    assert wrapped(text) == text
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "20")
    assert wrapped(text).splitlines() == [
        "4 operations are",
        "left out;",
        "  an indented line",
        "  that is long",
    ]


def test_counts_and_cuts():
    assert [number_of(n, "site") for n in (0, 1, 1200)] == ["0 sites", "1 site", "1,200 sites"]
    assert [shortened("float32", width) for width in (7, 6)] == ["float32", "floa.."]
