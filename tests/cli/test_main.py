"""The command as a whole: what its help teaches, and what all of its commands have."""

import argparse
import re
import shlex

import pytest

from halfstep.cli import main
from halfstep.cli._main import parsed, parser


def _commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = (
        action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(found.choices)


COMMANDS = _commands()


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    out = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^ +{name}  +\S.+\?$", out, re.MULTILINE), name
    examples = out[out.index("examples:") : out.index("exit status")]
    assert len(re.findall(r"^    halfstep ", examples, re.MULTILINE)) == 4
    assert [line[2] for line in out[out.index("exit status") :].splitlines()[1:4]] == [*"012"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_parse(name: str):
    epilog = COMMANDS[name].epilog or ""
    head, *lines = epilog.strip().splitlines()
    assert head == "example:"
    assert lines
    for line in lines:
        words = shlex.split(line.partition(">")[0])
        assert words[:2] == ["halfstep", name]
        # Nothing runs, but what is written is what the command takes.
        parsed(words[1:])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_its_exit_status(name: str):
    assert "The exit status is 0" in (COMMANDS[name].description or "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_json(name: str):
    (*found,) = (action for action in COMMANDS[name]._actions if "--json" in action.option_strings)
    assert [action.metavar for action in found] == ["FILE"]


def test_help_is_80_columns_wide(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    for made in (parser(), *COMMANDS.values()):
        long = [line for line in made.format_help().splitlines() if len(line) > 84]
        assert long == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("explian", "'explian': did you mean explain?"),
        ("lnt", "'lnt': did you mean lint?"),
        ("zzzz", "'zzzz': choose from explain, lint, bisect"),
    ],
)
def test_a_mistyped_command(word: str, said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main([word])
    assert f"unknown command {said}" in capsys.readouterr().err
