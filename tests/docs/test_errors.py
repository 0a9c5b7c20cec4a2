"""Every error and warning is on the page with a cure, and a test of this suite provokes it."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from docs.generators._raises import Site, of_source, sites
from docs.generators.errors import FAQ, PAGE, main, module, page, questions, split

ROOT = pathlib.Path(__file__).parents[2]
SITES = sites()
CAUSED = [site for site in SITES if not site.internal]
# Long enough to be no accident.
LENGTH = 12


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == page(SITES, FAQ.read_text()), (
        "write it anew: python -m docs.generators.errors"
    )


def test_every_raise_of_the_package_is_seen():
    """Counted otherwise than the generator counts."""
    lines = {(site.file, site.line) for site in SITES}
    unseen = []
    for path in sorted((ROOT / "halfstep").rglob("*.py")):
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            found = re.match(
                r"\s*(raise (\w+\.)*([A-Z]\w*(Error|Exception))\b|warnings\.warn\()", line
            )
            name = str(path.relative_to(ROOT))
            if found and (name, number) not in lines:
                unseen.append(f"{name}:{number}")
    # These tell what another error said, word by word, and add nothing.
    told_again = {name.partition(":")[0] for name in unseen}
    assert told_again <= {
        "halfstep/_policy/policy.py",
        "halfstep/cli/_arguments.py",
        "halfstep/cli/_bisect.py",
        "halfstep/cli/_formats.py",
        "halfstep/cli/_preflight.py",
        "halfstep/cli/_replay.py",
    }
    assert len(unseen) == 9


def test_every_template_is_on_the_page():
    text = PAGE.read_text()
    for site in CAUSED:
        assert all(part in text for part in split(site.template)), site


# Is each provoked by a test?


def _literals() -> Iterator[str]:
    """All texts of the tests but docstrings, as they would be found in a message."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
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


# The generator itself.

SOURCE = """
def check(value, path):
    hint = f" Did you mean {near(value)!r}?" if value else ""
    if value:
        raise ValueError(f"`value` must be {', '.join(NAMES)}; got {type(value).__name__}.{hint}")
    # Internal: nobody calls it so.
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
    # Says: it is <size>. Make it smaller.
    raise kind(elsewhere(value))
"""


def test_templates():
    found = [(one.kind, one.template, one.internal) for one in of_source(SOURCE, "file.py")]
    assert found == [
        ("ValueError", "`value` must be <names>; got <type of value>.[ Did you mean <value>?]", ""),
        ("RuntimeError", "never", "nobody calls it so."),
        ("TypeError", "it does not fit: pass one", ""),
        ("TypeError", "it does not fit: pass two", ""),
        ("CheckError", "<number of parts> are bad. Mend them.", ""),
        ("UserWarning", "<value> is odd. Use two.", ""),
        ("TypeError or ValueError", "it is <size>. Make it smaller.", ""),
    ]


@pytest.mark.parametrize(
    ("template", "cause", "cure"),
    [
        ("`a` is 1 or 2; got <a>.", "`a` is 1 or 2; got <a>.", "`a` is 1 or 2"),
        ("it is bad: pass b.", "it is bad:", "pass b."),
        ("it is bad; got <c>. Use d.", "it is bad; got <c>.", "Use d."),
        ("it is bad. For trees, use d.", "it is bad.", "For trees, use d."),
        ("no <a>; required one of <b>.[ Did you mean <c>?]",) * 2 + ("required one of <b>.",),
        ("it is bad.", "it is bad.", ""),
    ],
)
def test_cause_and_cure(template: str, cause: str, cure: str):
    found = split(template)
    assert found[0] == cause
    assert found[1].startswith(cure)
    assert bool(found[1]) == bool(cure)


def test_a_message_without_a_cure_is_refused():
    bad = Site("halfstep/_new.py", 7, "ValueError", "it is bad.", "")
    with pytest.raises(ValueError, match=r"halfstep/_new\.py:7: it is bad\."):
        page([*SITES, bad], FAQ.read_text())


def test_an_old_page_is_found(tmp_path: pathlib.Path):
    old = tmp_path / "errors.md"
    old.write_text(PAGE.read_text().replace("Cure: ", "", 1))
    assert main(["--check"], SITES, old) == 1
    assert main([], SITES, old) == 0
    assert main(["--check"], SITES, old) == 0


def test_modules_and_questions():
    def at(file: str) -> str:
        return module(Site(file, 1, "ValueError", "", ""))

    assert at("halfstep/_policy/policy.py") == "halfstep"
    assert at("halfstep/_preflight/api.py") == "halfstep.preflight"
    assert at("halfstep/optim/_check.py") == "halfstep.optim"
    assert at("halfstep/integrations/_orbax/_tree.py") == "halfstep.integrations.orbax"
    assert at("halfstep/compat/mpx.py") == "halfstep.compat.mpx"
    assert at("halfstep/compat/__init__.py") == "halfstep.compat"
    assert at("halfstep/compat/_scale.py") == "halfstep.compat"
    assert at("halfstep/cli/_load.py") == "The command"
    linked = set(re.findall(r"faq\.md#([^)]+)\)", PAGE.read_text()))
    # Those of JAX.
    assert set(questions(FAQ.read_text()).values()) - linked == {
        "cond-branches-must-have-equal-output-types-but-they-differ",
        "have-no-available-implicit-dtype-promotion-path",
        "reverse-mode-differentiation-does-not-work-for-laxwhile_loop",
        "scan-body-function-carry-input-and-carry-output-must-have-equal-types",
    }
