"""The comparison: its probes are complete, and what is not run says why."""

import json
import pathlib
import shutil

import pytest

from benchmarks import _comparison, peers, render
from benchmarks._documented import LIBRARIES
from benchmarks._environments import (
    ENVIRONMENTS,
    MissingEnvironmentError,
    python_of,
    run_with,
)
from benchmarks._features import FEATURES
from benchmarks._peers._probe import ANSWERS, absent, error_of, names

RESULT = json.loads((render.RESULTS / "peers.json").read_text())


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


def test_equal_answers_share_a_line():
    page = _comparison.text(RESULT)
    assert "- **mpx**, **jmp**, no: It is 2048, exactly 4096." in page


def test_absences_link_to_the_documentation():
    """A search of names is not shown as evidence; what the library lists is."""
    page = _comparison.text(RESULT)
    assert "public names contains" not in page
    sections = dict(section.split("\n", 1) for section in page.split("### ")[1:])
    for key, feature in FEATURES.items():
        for name, peer in RESULT["peers"].items():
            if peer["found"][key]["answer"] == "absent":
                link = f"[{peer['name']}]({LIBRARIES[name].page})"
                assert link in sections[feature.title], (key, name)
    assert "- Not a library for JAX: [torch.amp](https://" in sections["Runs on JAX 0.10"]


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
