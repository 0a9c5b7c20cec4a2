"""Every error and warning of the package says what to do, and a test of this suite provokes it."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests._raises import ROOT, cure, of_source, sites

# No user can cause these: they guard against mistakes in halfstep itself.
INTERNAL = {
    "<func> was not traced",
    "<name> cannot be imported as Python. Give a file of Python.",
    "<name> is a GPU and has no TPU topology; use `gpu_topology`.",
    "<name> is a TPU and has no GPU topology; use `tpu_topology`.",
    "<file> is a file of this package, and cannot be loaded.",
    "<wanted> is needed, got the operation `<name>`",
    "a traced function is needed, got <type of jaxpr>",
    "module <name> has no attribute <name>",
    "the recipe <recipe name> is random and needs a key: pass its state, scaling=recipe.init(...).",
}
# Nor these, which are about text that XLA's compilers write.
INTERNAL_FOLDER = "halfstep/_preflight/hlo/"
SITES = sites()
CAUSED = [
    site
    for site in SITES
    if site.template not in INTERNAL and not site.file.startswith(INTERNAL_FOLDER)
]
# Long enough to be no accident.
LENGTH = 12


def test_every_raise_of_the_package_is_seen():
    """Counted otherwise than `sites` counts."""
    lines = {(site.file, site.line) for site in SITES}
    unseen = []
    for path in sorted((ROOT / "halfstep").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            found = re.match(
                r"\s*(raise (\w+\.)*([A-Z]\w*(Error|Exception))\b|warnings\.warn\()", line
            )
            # What follows `from error` is what that error said, word by word.
            if found and (name, number) not in lines and not line.endswith(" from error"):
                unseen.append(line.strip())
    # Lines that are made elsewhere, and two that no user sees.
    assert unseen == [
        r'raise LintError("\n".join(lines))',
        "raise NotImplementedError",
        "raise FileNotFoundError",
    ]


def test_every_message_says_what_to_do():
    # A failed check lists its findings, and each line of them has its own advice. Who catches a
    # damaged folder says of what it is, and what to do.
    kinds = ("LintError", "DamagedFolderError")
    # What an argument was refused for is a message of its own, with its advice.
    handed_on = "`<name>` of `<called>` must be <expected text>: <reason>"
    bare = [
        site
        for site in CAUSED
        if site.kind not in kinds and site.template != handed_on and not cure(site.template)
    ]
    assert [f"{site.file}:{site.line}: {site.template}" for site in bare] == []


# Is each provoked by a test?


def _literals() -> Iterator[str]:
    """All texts of the tests but docstrings, as they would be found in a message."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name == "test_errors.py":
            continue
        tree = ast.parse(path.read_text())
        alone = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if node in alone:
                continue
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                # Patterns: without what makes them patterns.
                yield re.sub(r"\\(.)", r"\1", node.value)


def _pieces(text: str) -> set[tuple[str, ...]]:
    """What two texts have to share: some letters in a row, or three words, whatever is between."""
    fixed = re.split(r"<[^<>]*>|[\[\]]", text)
    grams = {(part[at : at + LENGTH],) for part in fixed for at in range(len(part) - LENGTH + 1)}
    words = re.findall("[A-Za-z_]{2,}", re.sub(r"<[^<>]*>", " ", text))
    return grams | set(zip(words, words[1:], words[2:], strict=False))


def test_a_test_provokes_each():
    tested = set().union(*(_pieces(text) for text in _literals()))
    pieces = {site: _pieces(site.template) for site in CAUSED}
    said: dict[tuple[str, ...], set[str]] = {}
    for site, found in pieces.items():
        for piece in found:
            said.setdefault(piece, set()).add(site.template)
    untested = []
    for site, found in pieces.items():
        # What only this message says; of the shortest ones all.
        own = {piece for piece in found if len(said[piece]) == 1} or found
        if not own & tested:
            untested.append(f"{site.file}:{site.line}: {site.template}")
    assert untested == [], "\n" + "\n".join(untested)


# How messages are read.

SOURCE = """
def check(value, path):
    hint = f" Did you mean {near(value)!r}?" if value else ""
    if value:
        raise ValueError(f"`value` must be {', '.join(NAMES)}; got {type(value).__name__}.{hint}")
    raise RuntimeError("never")

def other(error):
    lines = [f"{len(error.parts)} are bad."]
    lines.append("Mend them.")
    if error:
        raise misfit(error)
    try:
        pass
    except KeyError as error:
        raise CommandError(str(error)) from error
    raise CheckError("\\n".join(lines))

def misfit(error):
    return TypeError("it does not fit: " + ("pass one" if error else "pass two"))

def warned(value):
    warnings.warn(f"{value} is odd. Use two.", stacklevel=2)

def chosen(value):
    kind = TypeError if value else ValueError
    raise kind("it is larger. Make it smaller.")
"""


def test_templates():
    found = [(one.kind, one.template) for one in of_source(SOURCE, "file.py")]
    assert found == [
        ("ValueError", "`value` must be <names>; got <type of value>.[ Did you mean <value>?]"),
        ("RuntimeError", "never"),
        ("TypeError", "it does not fit: pass one"),
        ("TypeError", "it does not fit: pass two"),
        ("CheckError", "<number of parts> are bad. Mend them."),
        ("UserWarning", "<value> is odd. Use two."),
        ("TypeError or ValueError", "it is larger. Make it smaller."),
    ]


@pytest.mark.parametrize(
    ("template", "advice"),
    [
        ("`a` is 1 or 2; got <a>.", "`a` is 1 or 2"),
        ("it is bad: pass b.", "pass b."),
        ("it is bad; got <c>. Use d.", "Use d."),
        ("it is bad. For trees, use d.", "For trees, use d."),
        (
            "no <a>; required one of <b>.[ Did you mean <c>?]",
            "required one of <b>.[ Did you mean <c>?]",
        ),
        ("it is bad.", ""),
    ],
)
def test_cures(template: str, advice: str):
    assert cure(template) == advice
