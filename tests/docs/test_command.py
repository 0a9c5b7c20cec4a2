"""The command's page shows what the command prints."""

import re
import shlex

import pytest

from docs.generators.command import MARK, PAGE, PYTHON, shown, written
from halfstep.cli._main import parser

CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = [found[2] for found in MARK.finditer(PAGE.read_text())]
TRAIN = "\n\n".join(PYTHON.findall(PAGE.read_text()))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("words", SHOWN)
def test_what_is_shown_is_printed(words: str):
    assert f"<!-- shown: {words} -->\n\n{shown(words, TRAIN)}" in PAGE.read_text()


def test_what_is_not_printed_any_more_is_found():
    text = (
        "# Page\n\n<!-- shown: --version -->\n\n```console\n$ halfstep --version\nold\n```\n\nOn.\n"
    )
    made = written(text)
    assert "old" not in made
    assert made.startswith("# Page\n\n<!-- shown: --version -->\n\n```console\n$ halfstep --ver")
    assert made.endswith("```\n\nOn.\n")
    # A block that is not there yet is made, and once.
    assert written(text.replace("```console\n$ halfstep --version\nold\n```\n\n", "")) == made
    assert written(made) == made


def test_every_other_block_can_be_typed():
    for block in CONSOLE.findall(PAGE.read_text()):
        if block.startswith("$ halfstep"):
            continue
        for line in block.splitlines():
            words = shlex.split(re.split(r"[|>]", line)[0])
            assert words[0] == "halfstep"
            parser().parse_args(words[1:])


def test_every_command_is_on_the_page():
    help_ = parser().format_help()
    names = re.findall(r"^    (\w+)  +\S", help_[help_.index("COMMAND\n") :], re.MULTILINE)
    page = PAGE.read_text()
    assert len(names) > 7
    assert [name for name in names if f"$ halfstep {name}" not in page] == []
