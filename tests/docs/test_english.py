"""Phrases that read as if translated: none in the package, its messages and the documentation.

A sentence that opens with a "What ... is" clause hides its subject; a few are questions or names of
sections.
"""

import io
import pathlib
import re
import tokenize
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = (
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "halfstep").rglob("*.py")),
    *sorted((ROOT / "examples").rglob("*.py")),
)
FENCE = re.compile(r"^ *```.*?^ *```[ ]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`]+`")
NEW = re.compile(r"[-*|>:] |\d+\. |\w+: ")
"""How a list item, a cell or the description of a parameter begins."""
STRINGS = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
"""From Python 3.12 on, the text of an f-string is a token of its own."""
PHRASES = {
    "inside of": re.compile(r"\binside of\b", re.IGNORECASE),
    # "There is no file" and "is no longer" are English; "this is no file" is "is not a file".
    "is no": re.compile(
        r"(?<!there )(?<!There )\b(?:is|are|was|were) no "
        r"(?!longer|more|less|worse|better|smaller|larger|slower|faster|one\b)"
    ),
    "of which": re.compile(r"\bof which\b", re.IGNORECASE),
    "turn, for iteration": re.compile(
        r"\b(?:a|the|each|every|one|per|first|last|same|next|of|loop|\d[\d,]*) turns?\b"
        r"|\b(?:as it|in) turns\b"
    ),
    "beside": re.compile(r"\bbesides?\b", re.IGNORECASE),
}
WHAT_IS = re.compile(r'(?:^|[.!?:] |- |\| |")What\b[^.?!|\n]*\b(?:is|are|was|were)\b', re.MULTILINE)
MOST = 9


def paragraphs(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Paragraphs and list items on one line each, without code, with their line numbers."""
    text = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    text = CODE.sub(lambda match: "code" + "\n" * match[0].count("\n"), text)
    said, begin = "", line
    for number, one in enumerate([*text.splitlines(), ""], line):
        stripped = one.strip().removeprefix("# ")
        if not stripped or NEW.match(stripped):
            if said:
                yield begin, said
            said, begin = stripped, number
        else:
            said = f"{said} {stripped}" if said else stripped
            begin = begin if said != stripped else number


def prose(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """What a file says to a reader: a page without its code; strings and comments of a program."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from paragraphs(text, 1)
        return
    comment, begin = "", 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            begin = begin or token.start[0]
            comment += token.string.lstrip("# ") + "\n"
        elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            if comment:
                yield from paragraphs(comment, begin)
                comment, begin = "", 0
            if token.type in STRINGS:
                yield from paragraphs(token.string.strip('rf"'), token.start[0])


def found(pattern: re.Pattern[str]) -> list[str]:
    """Where a pattern is in the prose, with what is around it."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {said[max(0, match.start() - 40) : match.end() + 40]}"
        for path in SOURCES
        for number, said in prose(path)
        for match in pattern.finditer(said)
    ]


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_not_used(phrase: str):
    assert found(PHRASES[phrase]) == []


def test_few_sentences_open_with_what_is():
    lines = found(WHAT_IS)
    assert len(lines) <= MOST, "\n".join(lines)


@pytest.mark.parametrize(
    ("line", "phrase"),
    [
        ("It runs inside of a loop.", "inside of"),
        ("A metric is no loss.", "is no"),
        ("Of 3 values, of which one is lost.", "of which"),
        ("A loop of 4,096 turns.", "turn, for iteration"),
        ("Its time beside that of the step.", "beside"),
    ],
)
def test_a_phrase_is_found(line: str, phrase: str):
    assert PHRASES[phrase].search(line)
    for good in ("There is no file.", "It is no longer there.", "`split` turns it into two."):
        assert not PHRASES[phrase].search(good)


def test_an_opening_clause_is_found():
    assert WHAT_IS.search("It is stored. What is beyond 65504 is infinite.")
    assert not WHAT_IS.search("Values beyond 65504 are infinite. What helps?")
