"""Every snippet in the README, the docs and the docstrings runs, and prints what a page shows."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import pathlib
import re
import textwrap
import types
from typing import NamedTuple

import jax
import pytest

import halfstep
from halfstep import debug, optim, quant, reliability
from tests._rows import slow_unless
from tests.preflight._compilers import need

ROOT = pathlib.Path(__file__).parents[1]
README, HOME = ROOT / "README.md", ROOT / "docs" / "index.md"
# The home page begins with the README's first screen, which need not run twice.
PAGES = [README, *sorted(page for page in (ROOT / "docs").rglob("*.md") if page != HOME)]
BLOCK = re.compile(
    r"^([ \t]*)```python([^\n]*)\n(.*?)^\1```[ ]*\n?(?:\n\1```text\n(.*?)^\1```[ ]*$)?",
    re.MULTILINE | re.DOTALL,
)


COMPILED = (
    "README.md",
    "fit-into-memory.md",
    "fp8.md",
    "gradient-release.md",
    "my-loss-is-nan.md",
    "optimizers.md",
    "preflight.md",
    "quant.md",
    "training-loop.md",
    "what-needs-float32.md",
)


class Block(NamedTuple):
    options: str
    code: str
    shown: str
    """The text block right behind it; empty if there is none."""


def blocks(text: str) -> list[Block]:
    """The Python blocks of a Markdown text."""
    return [
        Block(m[2].strip(), textwrap.dedent(m[3]), textwrap.dedent(m[4] or ""))
        for m in BLOCK.finditer(text)
    ]


def execute(code: str, path: str, namespace: dict) -> None:
    """Run a block; without a compiler that it asks, skip the test from here on.

    Nothing marks such blocks. A block that asks a compiler raises where there is none, and only
    there is it excused; nowhere if `HALFSTEP_REQUIRE_COMPILERS` is set.
    """
    try:
        exec(compile(code, path, "exec"), namespace)
    except halfstep.PreflightError:
        need("cuda")
        need("tpu")
        raise


def run(sources: list[Block], name: str, tmp_path: pathlib.Path) -> int:
    """Run blocks one after the other in one namespace, as a reader would."""
    # A real file, because inspect and tracebacks look for one.
    namespace: dict = {"__name__": "snippet"}
    count = 0
    for number, (options, code, shown) in enumerate(sources):
        if "norun" in options:
            raise AssertionError(f"{name}: every snippet runs; there is no way to leave one out")
        path = tmp_path / f"{re.sub(r'[^a-zA-Z0-9]', '_', name)}_{number}.py"
        path.write_text(code)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            execute(code, str(path), namespace)
        if shown:
            assert printed.getvalue() == shown
        count += 1
    return count


@pytest.mark.usefixtures("standard_promotion")
# On every change the README is run from the built wheel, as its readers do (`.ci/run`). Pages whose
# snippets compile many programs are run every night and before a release.
@pytest.mark.parametrize(
    "page",
    slow_unless(PAGES, lambda page: page.name not in COMPILED),
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_pages(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run(blocks(page.read_text()), page.stem, tmp_path)
    jax.clear_caches()


has_docs = pytest.mark.skipif(not HOME.exists(), reason="docs/ is not in a source distribution")


@has_docs
def test_the_home_page_has_no_snippets_of_its_own():
    assert blocks(HOME.read_text())
    assert set(blocks(HOME.read_text())) <= set(blocks(README.read_text()))


@has_docs
def test_some_pages_show_output():
    shown = {page.stem for page in PAGES if any(block.shown for block in blocks(page.read_text()))}
    assert shown >= {"choosing-a-policy", "loss-scaling"}


def public_modules() -> dict[str, types.ModuleType]:
    """Modules with public names, by what stands before these."""
    found = {
        "": halfstep,
        "optim.": optim,
        "quant.": quant,
        "debug.": debug,
        "reliability.": reliability,
    }
    if importlib.util.find_spec("orbax") is not None:
        found["orbax."] = importlib.import_module("halfstep.integrations.orbax")
    return found


def documented() -> dict[str, str]:
    """Docstrings by dotted name: every public object and every public method."""
    found = {}
    for prefix, module in public_modules().items():
        # Not `vars`: the names of the package are imported when they are first used.
        for name, thing in inspect.getmembers(module):
            is_ours = getattr(thing, "__module__", "").startswith("halfstep")
            if name.startswith("_") or not is_ours:
                continue
            if inspect.isfunction(thing) or inspect.isclass(thing):
                # Its own: `inspect.getdoc` would take that of a base class.
                found[f"{prefix}{name}"] = inspect.cleandoc(thing.__doc__ or "")
    source = (ROOT / "halfstep" / "_base" / "formats.py").read_text()
    found["FORMATS"] = source[source.index("FORMATS: ") :]
    found["preflight"] = inspect.getdoc(halfstep.preflight.__call__) or ""
    found["preflight.largest_batch"] = inspect.getdoc(halfstep.preflight.largest_batch) or ""
    return found


WITH_EXAMPLES = {name: doc for name, doc in documented().items() if "```python" in doc}
# Captures are written by Orbax.
NEED_ORBAX = {"debug.Capture", "debug.load_capture"}


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstrings(name: str, tmp_path: pathlib.Path):
    if name in NEED_ORBAX:
        pytest.importorskip("orbax.checkpoint")
    with jax.numpy_dtype_promotion("standard"):
        assert run(blocks(WITH_EXAMPLES[name]), name, tmp_path) > 0


def test_every_public_name_has_an_example():
    assert set(documented()) - set(WITH_EXAMPLES) == set()


def test_a_broken_snippet_fails(tmp_path: pathlib.Path):
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        run(blocks("```python\n1 / 0\n```\n"), "broken", tmp_path)
    with pytest.raises(AssertionError, match="2"):
        run(blocks("```python\nprint(1)\n```\n\n```text\n2\n```\n"), "broken", tmp_path)


ASKS = """\
```python
import halfstep

halfstep.preflight(lambda x: x, (1.0,), targets="h100")
```
"""


@pytest.mark.parametrize("missing", [None, "jax-cuda12-plugin", "libtpu"])
@pytest.mark.parametrize("required", [True, False])
def test_only_a_missing_compiler_excuses(
    missing: str | None, required: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    def version(package: str) -> str:
        if package == missing:
            raise importlib.metadata.PackageNotFoundError(package)
        return "0.0"

    def refuse(*_: object, **__: object) -> None:
        raise halfstep.PreflightError("no answer")

    monkeypatch.setattr(type(halfstep.preflight), "__call__", refuse)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setenv("HALFSTEP_REQUIRE_COMPILERS", "yes" if required else "")
    expected: type[BaseException] = halfstep.PreflightError
    if missing is not None:
        expected = importlib.metadata.PackageNotFoundError if required else pytest.skip.Exception
    with pytest.raises(expected, match=missing or "no answer"):
        run(blocks(ASKS), "asks", tmp_path)
