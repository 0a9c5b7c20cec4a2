"""What `import halfstep` does and does not do, and what the tree promises."""

import ast
import pathlib
import re
import statistics
import subprocess
import sys

import pytest

import halfstep
from tests.conftest import SUBJECTS

pytestmark = [pytest.mark.core, pytest.mark.types]

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted((ROOT / "halfstep").rglob("*.py"))
OTHERS = [p for part in ("tests", "benchmarks", "examples") for p in (ROOT / part).rglob("*.py")]
EXTRAS = ("flax", "haiku", "matplotlib", "orbax", "rich", "tqdm")


def _run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_starts_no_backend():
    # `backends` creates them; the cache behind it is empty as long as nobody asked.
    code = (
        "import halfstep; from halfstep.compat import flashoptim_jax, jaxamp, jmp, mpx; "
        "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    )
    assert _run(code) == "False"


def test_import_needs_no_extra():
    code = f"import sys, halfstep; print([m for m in {EXTRAS!r} if m in sys.modules])"
    assert _run(code) == "[]"


def test_private_jax_is_in_one_file():
    for path in SOURCES:
        text = path.read_text()
        assert "jax._src" not in text, path
        assert "__module__]" not in text or path.name == "private_jax.py", path


def test_files_are_of_a_size_to_read():
    lines = {path: len(path.read_text().splitlines()) for path in (*SOURCES, *OTHERS)}
    assert {path.name: count for path, count in lines.items() if count > 600} == {}
    assert 150 <= statistics.median(lines[path] for path in SOURCES) <= 200


def test_no_module_level_mutable_state():
    """Module variables are constants: no lists, dicts or sets that could be written to."""
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            value = getattr(node, "value", None)
            if isinstance(node, ast.Assign | ast.AnnAssign):
                assert not isinstance(value, ast.List | ast.Dict | ast.Set), (path, node.lineno)


def test_tests_need_what_the_source_distribution_has():
    """Only tests whose subject is another part of the repository import that part."""
    needing = {
        str(path.relative_to(ROOT / "tests"))
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(
            r"^\s*(from|import) (benchmarks|docs|examples)\b", path.read_text(), re.MULTILINE
        )
    }
    assert {name for name in needing if name.split("/")[0] not in SUBJECTS} == set()


def test_changelog_begins_with_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    assert next(v for v in versions if v != "Unreleased") == halfstep.__version__


@pytest.mark.parametrize("name", [n for n in dir(halfstep) if not n.startswith("_")])
def test_public_names_are_documented(name: str):
    thing = getattr(halfstep, name)
    if callable(thing):
        assert thing.__doc__, name
        assert len(thing.__doc__.splitlines()[0]) > 10
