"""Every snippet in the README, the docs and the docstrings runs."""

import inspect
import pathlib
import re
import textwrap

import jax
import pytest

import halfstep

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^([ \t]*)```python([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[str, str]]:
    """The Python blocks of a Markdown text as (options, code)."""
    return [(m[2].strip(), textwrap.dedent(m[3])) for m in BLOCK.finditer(text)]


def run(sources: list[tuple[str, str]], name: str, tmp_path: pathlib.Path) -> int:
    """Run blocks one after the other in one namespace, as a reader would."""
    # A real file, because inspect and tracebacks look for one.
    namespace: dict = {"__name__": "snippet"}
    count = 0
    for number, (options, code) in enumerate(sources):
        if "norun" in options:
            raise AssertionError(f"{name}: every snippet runs; there is no way to leave one out")
        path = tmp_path / f"{re.sub(r'[^a-zA-Z0-9]', '_', name)}_{number}.py"
        path.write_text(code)
        exec(compile(code, str(path), "exec"), namespace)
        count += 1
    return count


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pages(page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run(blocks(page.read_text()), page.stem, tmp_path)
    jax.clear_caches()


def documented() -> dict[str, str]:
    """Docstrings by dotted name: every public object and every public method."""
    found = {}
    for name in dir(halfstep):
        thing = getattr(halfstep, name)
        if name.startswith("_") or inspect.ismodule(thing):
            continue
        if inspect.isfunction(thing) or inspect.isclass(thing):
            found[name] = inspect.getdoc(thing) or ""
    source = (ROOT / "halfstep" / "_formats.py").read_text()
    found["FORMATS"] = source[source.index("FORMATS: ") :]
    return found


WITH_EXAMPLES = {name: doc for name, doc in documented().items() if "```python" in doc}


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_docstrings(name: str, tmp_path: pathlib.Path):
    with jax.numpy_dtype_promotion("standard"):
        assert run(blocks(WITH_EXAMPLES[name]), name, tmp_path) > 0


def test_the_main_names_have_examples():
    trivial = {
        "AbstractLossScaling",
        "Format",
        "SkipLimitError",
        "apply_gradients",
        "cast_to_bfloat16",
        "cast_to_float16",
        "cast_to_float32",
        "cast_to_full_precision",
        "cast_to_half_precision",
        "half_dtype",
    }
    assert set(documented()) - set(WITH_EXAMPLES) == trivial


def test_a_broken_snippet_fails(tmp_path: pathlib.Path):
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        run(blocks("```python\n1 / 0\n```\n"), "broken", tmp_path)
