"""Every command fits a terminal of 80 columns, and uses more columns where there are more."""

import io
import shlex
import sys

import pytest

from halfstep.cli import main
from halfstep.cli._main import parser
from tests.cli.test_main import COMMANDS

LOSSES = "tests.cli._losses"
# Commands whose answer takes no compiler. Tables of the others are made by the same function.
LINES = (
    "formats",
    "formats 0.1 -1e-8 70000",
    "doctor",
    f"explain {LOSSES}:clean",
    f"explain {LOSSES}:clean --full",
    f"lint {LOSSES}:faulty",
    f"bisect {LOSSES}:squares --tolerance 0.01",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(line: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    main(shlex.split(line))
    return screen.getvalue().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_answers_fit_80_columns(line: str, monkeypatch: pytest.MonkeyPatch):
    lines = shown(line, 80, monkeypatch)
    assert lines
    # A policy is one word, to be copied: it is not broken.
    assert [one for one in lines if len(one) > 80 and " " in one] == []


@pytest.mark.parametrize("line", LINES)
def test_answers_use_more_columns(line: str, monkeypatch: pytest.MonkeyPatch):
    narrow, wide = (shown(line, columns, monkeypatch) for columns in (80, 200))
    # The first words of lines are what the lines are about: these are whole in both.
    first = {one.split()[0] for one in narrow if one.strip()}
    assert [word for word in first if word.endswith("..")] == []
    assert len(wide) <= len(narrow)
    assert sum(".." in one for one in wide) <= sum(".." in one for one in narrow)
    if len(wide) == len(narrow):
        assert sum(map(len, wide)) >= sum(map(len, narrow))


def test_numbers_and_bits_are_whole(monkeypatch: pytest.MonkeyPatch):
    text = "\n".join(shown("formats 0.1", 80, monkeypatch))
    assert "0 01111111011 1001100110011001100110011001100110011001100110011010" in text
    assert "2.2251e-308" in "\n".join(shown("formats", 80, monkeypatch))


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    for made in (parser(), *COMMANDS.values()):
        assert [line for line in made.format_help().splitlines() if len(line) > 80] == []


def test_the_command_names_its_own_option(monkeypatch: pytest.MonkeyPatch):
    text = "\n".join(shown(f"explain {LOSSES}:clean", 200, monkeypatch))
    assert "--full shows all" in text
    assert "table(full=True)" not in text
