"""What a release is accompanied by: citation, security policy, deprecations, workflows."""

import pathlib
import re
import runpy
import zipfile
from typing import Any

import pytest
import yaml

import halfstep
from halfstep._base.versions import TESTED_JAX, TESTED_PYTHON, known_to_work

ROOT = pathlib.Path(__file__).parents[1]


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def citation_problems(found: dict[str, Any]) -> list[str]:
    """What the Citation File Format 1.2.0 requires, and what must be as in the package."""
    problems = [
        f"`{key}` is required"
        for key in ("cff-version", "message", "title", "authors")
        if not found.get(key)
    ]
    if found.get("cff-version") != "1.2.0" or found.get("type", "software") != "software":
        problems.append("it is software, in version 1.2.0 of the format")
    if found.get("version") != halfstep.__version__:
        problems.append(f"the version is {halfstep.__version__}")
    if found.get("license") != "Apache-2.0":
        problems.append("the license is Apache-2.0")
    released = f"[{found.get('version')}] - {found.get('date-released')}"
    if released not in (ROOT / "CHANGELOG.md").read_text():
        problems.append("the date is that of the changelog")
    people = [found, *found.get("references", [])]
    for person in (person for entry in people for person in entry.get("authors", [])):
        if not ("name" in person or {"family-names", "given-names"} <= set(person)):
            problems.append(f"an author has a name; got {person}")
    for entry in found.get("references", []):
        problems += [f"a reference has `{key}`" for key in ("type", "title") if key not in entry]
    return problems


def test_the_citation_file():
    found = load("CITATION.cff")
    assert citation_problems(found) == []
    (paper,) = found["references"]
    assert paper["url"] in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"version": "9.9.9"}, "the version is"),
        ({"authors": []}, "`authors` is required"),
        ({"authors": [{"family": "Nobody"}]}, "an author has a name"),
        ({"date-released": "2020-01-01"}, "that of the changelog"),
    ],
)
def test_a_wrong_citation_is_noticed(change: dict[str, Any], problem: str):
    found = citation_problems({**load("CITATION.cff"), **change})
    assert any(problem in each for each in found), found


def test_deprecated_names_are_listed():
    """A warning in the package has a row in the table, and none is there without."""
    page = (ROOT / "docs" / "deprecations.md").read_text()
    section = page.partition("## Deprecated names\n")[2].partition("\n## ")[0]
    warns = [
        path.relative_to(ROOT)
        for path in (ROOT / "halfstep").rglob("*.py")
        if re.search(r"\bDeprecationWarning\b|warnings\.deprecated", path.read_text())
    ]
    assert (section.strip() == "None.") == (warns == []), warns


def test_workflows():
    """Every supported Python on a change, and JAX's newest and pre-releases every night."""
    for name, job in (("tests", "ci"), ("release", "test")):
        steps = load(f".github/workflows/{name}.yml")["jobs"][job]["steps"]
        assert tuple(steps[1]["with"]["python-version"].split()) == TESTED_PYTHON
        assert {"run": "bash .ci/run"} in steps
    nightly = load(".github/workflows/nightly.yml")["jobs"]["jax"]
    rows = nightly["strategy"]["matrix"]["include"]
    assert [(row["options"], row["tests"]) for row in rows] == [
        ("", "not slow"),
        ("--pre", "not slow"),
        ("", "slow"),
    ]
    assert nightly["steps"][1]["with"]["python-version"] == TESTED_PYTHON[-1]
    assert "pip install --upgrade ${{ matrix.options }} jax jaxlib" in nightly["steps"][2]["run"]
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        assert "permissions" in load(str(path.relative_to(ROOT))), path
        # A tag can be moved to other code.
        for action in re.findall(r"uses: (.*)", path.read_text()):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action), (path, action)


def test_what_may_publish_runs_no_code_of_the_repository():
    workflow = load(".github/workflows/release.yml")
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        may_write = "write" in job["permissions"].values()
        has_code = any("checkout" in step.get("uses", "") for step in job["steps"])
        assert may_write != has_code, name
    # In this order: nothing is published that was not tested, and nothing tagged that is not there.
    needs = {name: job.get("needs") for name, job in workflow["jobs"].items()}
    assert needs == {"test": None, "build": "test", "publish": "build", "tag": "publish"}
    script = (ROOT / ".ci" / "build").read_text()
    assert "--require-hashes --requirement requirements/release.txt" in script
    assert "--no-isolation" in script


def test_ci_runs_every_tested_python():
    script = (ROOT / ".ci" / "run").read_text()
    found = re.findall(r"\$\((?:required|python_of) (3\.\d+)\)", script)
    assert sorted(found) == list(TESTED_PYTHON)


def test_readers_are_told_which_versions_are_tested():
    pythons = f"Python {TESTED_PYTHON[0]} to {TESTED_PYTHON[-1]}"
    for path in ("README.md", "docs/support.md"):
        text = (ROOT / path).read_text()
        assert f"{pythons} and {known_to_work()}" in text, path


def test_tested_versions_are_the_pinned_ones():
    pins = [ROOT / "requirements" / f"test{name}.txt" for name in ("-oldest", "-middle", "")]
    found = [re.findall(r"^jax==(\S+)", path.read_text(), re.MULTILINE) for path in pins]
    assert found == [[version] for version in TESTED_JAX]
    compiled = (ROOT / "requirements" / "compile").read_text()
    pythons = [re.findall(rf"^pin {path.stem} (\S+)", compiled, re.MULTILINE) for path in pins]
    assert pythons == [[version] for version in TESTED_PYTHON]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "requirements").glob("*.txt")), ids=lambda path: path.stem
)
def test_pins_have_hashes_and_no_index(path: pathlib.Path):
    """`requirements/compile` makes every file; one that pins JAX pins a tested version."""
    text = path.read_text()
    assert re.search(rf"^pin {path.stem} ", (ROOT / "requirements/compile").read_text(), re.M)
    assert not re.search(r"^--|https?:", text, re.MULTILINE)
    hashed = re.compile(r"\S+==\S+ (; .* )?\\\n.*--hash=sha256:")
    pins = re.split(r"\n(?=\S)", text.strip())
    assert [pin for pin in pins if not hashed.match(pin)] == []
    assert set(re.findall(r"^jax==(\S+)", text, re.MULTILINE)) <= set(TESTED_JAX)


def test_programs_of_other_packages_run_every_night():
    job = load(".github/workflows/nightly.yml")["jobs"]["ecosystem"]
    assert job["steps"][1]["with"]["python-version"] == TESTED_PYTHON[-1]
    assert "--require-hashes --requirement requirements/ecosystem.txt" in job["steps"][2]["run"]
    assert (
        "--require-hashes --requirement requirements/ecosystem-oldest.txt" in job["steps"][3]["run"]
    )
    assert job["steps"][4]["run"].startswith("python -m benchmarks.ecosystem --resume")


# What may depend on the version of JAX: folders whose every test also runs on the oldest.
ALSO_ON_OLDEST = ("autocast", "conformance", "integrations")


@pytest.mark.parametrize("folder", ALSO_ON_OLDEST)
def test_what_also_runs_on_the_oldest_jax(folder: str):
    files = sorted((ROOT / "tests" / folder).glob("test_*.py"))
    assert files
    assert [path.name for path in files if "pytest.mark.core" not in path.read_text()] == []


def test_the_security_policy_names_what_is_read():
    text = (ROOT / "SECURITY.md").read_text()
    for name in ("Checkpoints", "Policy.load", "HALFSTEP_CACHE_DIR", "Report a vulnerability"):
        assert name in text
    sources = [path.read_text() for path in (ROOT / "halfstep").rglob("*.py")]
    assert not any(
        re.search(r"^\s*(import|from) (pickle|dill|cloudpickle)", s, re.M) for s in sources
    )


# What is built.


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci" / f"{name}.py"))


METADATA = """\
Metadata-Version: 2.4
Name: halfstep
Version: 0.1.0
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Python: >=3.11
Requires-Dist: equinox>=0.13
Requires-Dist: jax>=0.10
Requires-Dist: jaxtyping>=0.3
Requires-Dist: optax>=0.2
Requires-Dist: flax>=0.12; extra == 'flax'
Description-Content-Type: text/markdown
"""
INFO = "halfstep-0.1.0.dist-info"
WHEEL = {
    "halfstep/__init__.py": "",
    "halfstep/_preflight/target/accelerators.toml": "",
    "halfstep/py.typed": "",
    f"{INFO}/METADATA": METADATA,
    f"{INFO}/WHEEL": "",
    f"{INFO}/RECORD": "",
    f"{INFO}/entry_points.txt": "[console_scripts]\nhalfstep = halfstep.cli:main\n",
    f"{INFO}/licenses/LICENSE": "",
}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"tests/test_grad.py": ""}, "tests/test_grad.py does not belong there"),
        ({"halfstep/notes.txt": ""}, "halfstep/notes.txt does not belong there"),
        ({"halfstep/py.typed": None}, "halfstep/py.typed is missing"),
        ({f"{INFO}/licenses/LICENSE": None}, "licenses/LICENSE is missing"),
        (
            {f"{INFO}/METADATA": METADATA.replace("Apache-2.0", "MIT")},
            "must be Apache-2.0; got MIT",
        ),
        ({f"{INFO}/METADATA": METADATA.replace("; extra == 'flax'", "")}, "got equinox, flax, jax"),
        ({f"{INFO}/entry_points.txt": ""}, "the command halfstep is missing"),
    ],
)
def test_what_is_in_a_wheel(
    tmp_path: pathlib.Path, changes: dict[str, str | None], problem: str | None
):
    path = tmp_path / "halfstep-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**WHEEL, **changes}.items():
            if content is not None:
                archive.writestr(name, content)
    found = script("check_dist")["wheel_problems"](path)
    assert len(found) == bool(problem), found
    assert problem is None or problem in found[0]


def test_licenses(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    licenses = script("check_licenses")
    assert licenses["main"]() == 0, capsys.readouterr().out
    monkeypatch.setitem(licenses["BY_HAND"], "optax", "GPL-3.0-only")
    assert licenses["main"]() == 1
    assert "optax (core" in capsys.readouterr().out


README = """\
```console
pip install halfstep
$ halfstep --version
```

For GPUs `pip install "halfstep[cuda-preflight]"`, for TPUs `"halfstep[tpu-preflight]"`.

```python
import halfstep
```

```text
not run
```
"""


def test_what_a_new_user_does():
    assert script("new_user")["actions"](README) == [
        ("install", "\n"),
        ("console", "halfstep --version\n"),
        ("install", "[cuda-preflight]\n[tpu-preflight]\n"),
        ("python", "import halfstep\n"),
    ]
    kinds = [kind for kind, _ in script("new_user")["actions"]((ROOT / "README.md").read_text())]
    assert kinds[0] == "install"
    assert kinds.count("python") >= 2
