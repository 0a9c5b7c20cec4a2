"""The comparison: its tests exist, its probes are complete, and what is not run says why."""

import ast
import functools
import json
import pathlib
import shutil

import pytest

from benchmarks import _comparison, peers, render
from benchmarks._environments import (
    ENVIRONMENTS,
    ROOT,
    MissingEnvironmentError,
    python_of,
    run_with,
)
from benchmarks._features import FEATURES
from benchmarks._peers._probe import ANSWERS, absent, error_of, names

RESULT = json.loads((render.RESULTS / "peers.json").read_text())


@functools.cache
def written_in(file: str) -> frozenset[str]:
    """The tests of a file, by the names that pytest gives them."""
    path = ROOT / file
    found = set()
    for node in ast.parse(path.read_text()).body if path.is_file() else ():
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (one.name for one in node.body if isinstance(one, ast.FunctionDef))
            found.update(f"{node.name}::{name}" for name in inner)
    return frozenset(found)


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    return name in written_in(file) and name.rpartition("::")[2].startswith("test_")


@pytest.mark.parametrize("key", FEATURES)
def test_every_cell_of_ours_is_backed_by_a_test(key: str):
    assert FEATURES[key].tests
    assert [test for test in FEATURES[key].tests if not is_there(test)] == []


def test_a_test_that_is_not_there_is_noticed():
    assert is_there("tests/test_grad.py::TestAux::test_an_infinite_metric_is_no_overflow")
    assert not is_there("tests/test_grad.py::test_an_infinite_metric_is_no_overflow")
    assert not is_there("tests/test_nothing.py::test_nothing")


def test_every_library_has_every_probe():
    assert list(RESULT["peers"]) == list(peers.PEERS)
    assert peers.failures(RESULT["peers"]) == []
    for name, peer in RESULT["peers"].items():
        if "not_run" in peer:
            assert len(peer["not_run"]) > 10
            continue
        assert set(peer["found"]) == set(FEATURES), name
        assert {found["answer"] for found in peer["found"].values()} <= set(ANSWERS)
        assert all(found["evidence"] for found in peer["found"].values())


def test_probes_ran_with_the_versions_that_are_installed_now():
    for name, environment in ENVIRONMENTS.items():
        if name in RESULT["peers"] and "found" in RESULT["peers"][name]:
            pins = dict(requirement.split("==") for requirement in environment.requires)
            versions = RESULT["peers"][name]["versions"]
            assert {package: pins[package] for package in versions if package in pins} == {
                package: version for package, version in versions.items() if package in pins
            }


def test_ours_passes_all_of_them():
    found = RESULT["peers"][peers.OURS]["found"]
    assert {key: one["evidence"] for key, one in found.items() if one["answer"] != "yes"} == {}


def test_failures_are_found():
    found = {key: {"answer": "yes", "evidence": "seen"} for key in FEATURES}
    assert peers.failures({"a": {"found": found}, "b": {"not_run": "no wheel"}}) == []
    del found["why"]
    found["skip"] = {"answer": "error", "evidence": "AssertionError: no"}
    assert peers.failures({"a": {"found": found}}) == [
        "a, skip: AssertionError: no",
        "a, why: no probe",
    ]


def test_what_cannot_be_installed_is_not_run(tmp_path: pathlib.Path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert peers.probe("jmp", cache=tmp_path) == {"not_run": "uv is not installed: pip install uv"}
    result = {"peers": {**RESULT["peers"], "jmp": {"name": "jmp", "not_run": "no wheel"}}}
    page = _comparison.text(result)
    assert "| not run |" in page
    assert "- **jmp**, not run: no wheel" in page


def test_what_uv_says_is_the_reason(tmp_path: pathlib.Path, monkeypatch):
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho '  * No solution found' >&2\nexit 1\n")
    uv.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(uv))
    with pytest.raises(MissingEnvironmentError, match=r"^No solution found$"):
        python_of("jmp", cache=tmp_path)


def test_a_program_that_fails_is_no_answer(tmp_path: pathlib.Path):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'Traceback: it broke' >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"some\.module failed:\nTraceback: it broke"):
        run_with(program, "some.module")
    program.write_text("#!/bin/sh\necho Hello\necho '{\"a\": 1}'\n")
    assert run_with(program, "some.module") == {"a": 1}


def test_an_absence_is_observed():
    assert {"loads", "JSONDecoder", "decode"} <= names(json)
    assert absent(json, "explain").evidence.endswith("contains `explain`.")
    with pytest.raises(AssertionError, match="found \\['load', 'loads'\\]"):
        absent(json, "load")
    assert error_of(lambda: json.loads("{")) is not None
    assert error_of(lambda: json.loads("{}")) is None


@pytest.mark.slow
def test_the_probes_of_ours():
    """Needs XLA's GPU compiler, for one of them."""
    assert peers.failures({"halfstep": (made := peers.probe(peers.OURS))}) == []
    assert {one["answer"] for one in made["found"].values()} == {"yes"}
