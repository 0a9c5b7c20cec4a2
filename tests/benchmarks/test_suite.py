"""`python -m benchmarks`: it knows all of them, runs them in turn, and goes on after a failure."""

import importlib
import os
import pathlib
import platform
import re
import subprocess
import sys
import types
from typing import Any

import pytest

from benchmarks import PEERS, __main__ as command, _environments, _report, _suite, render
from benchmarks._environments import MissingEnvironmentError
from benchmarks._suite import GROUPS, Benchmark

FOLDER = pathlib.Path(_suite.__file__).parent


def test_every_module_is_in_one_group():
    names = [one.name for one in _suite.every()]
    # Others write parts of pages, and no results.
    uses = re.compile(r"^from benchmarks\._report import .*\bparser\b", re.MULTILINE)
    modules = {p.stem for p in FOLDER.glob("*.py") if uses.search(p.read_text())}
    assert len(names) == len(set(names))
    assert set(names) == modules
    assert all(one.about().endswith((".", "?")) or ":" in one.about() for one in _suite.every())


@pytest.mark.parametrize("one", list(_suite.every()), ids=lambda one: one.name)
def test_each_has_the_options_that_it_is_given(one: Benchmark, capsys: pytest.CaptureFixture):
    module = importlib.import_module(f"benchmarks.{one.name}")
    with pytest.raises(SystemExit, match=r"^0$"):
        module.main(["--help"])
    said = capsys.readouterr().out
    given = [word for word in one.command("out", "images", quick=True) if word.startswith("--")]
    assert [option for option in given if option not in said] == []
    assert one.plots == ("--plot" in said)


def test_names_and_groups():
    assert [one.name for one in _suite.chosen(["debug"])] == ["debug", "bisect"]
    assert [one.name for one in _suite.chosen(["bisect", "fp8_memory"])] == ["fp8_memory", "bisect"]
    assert _suite.chosen([]) == list(_suite.every())
    with pytest.raises(ValueError, match=r"no benchmark or group is named speed\. There are the"):
        _suite.chosen(["speed"])


def test_list(capsys: pytest.CaptureFixture):
    assert command.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(f"\n{group}\n" in f"\n{said}" for group in GROUPS)
    assert "  release  " in said


def test_an_unknown_name(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(["speed"])
    assert "no benchmark or group is named speed" in capsys.readouterr().err


@pytest.fixture
def ran(monkeypatch, tmp_path) -> list[list[str]]:
    """Commands instead of processes; that of `bisect` fails, and jmp cannot be installed."""
    commands: list[list[str]] = []

    def folder(name: str) -> pathlib.Path:
        if name == "jmp":
            raise MissingEnvironmentError("no wheel")
        return pathlib.Path("packages", name)

    def fake(given: list[str], env: dict[str, str], **_: Any) -> Any:
        commands.append([*given[1:], env[PEERS]])
        return types.SimpleNamespace(returncode=3 if "benchmarks.bisect" in given else 0)

    monkeypatch.setattr(subprocess, "run", fake)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    monkeypatch.setattr(_environments, "packages_of", folder)
    return commands


def test_it_goes_on_after_a_failure(ran, monkeypatch, capsys: pytest.CaptureFixture):
    rendered: list[Any] = []
    monkeypatch.setattr(render, "main", rendered.append)
    assert command.main(["bisect", "memory"]) == 1
    assert [given[1] for given in ran] == [
        "benchmarks.memory",
        "benchmarks.release",
        "benchmarks.plan",
        "benchmarks.plan_optimum",
        "benchmarks.plan_batches",
        "benchmarks.plan_training",
        "benchmarks.remat",
        "benchmarks.preflight_roles",
        "benchmarks.bisect",
    ]
    assert ran[0][2:] == [
        "--json",
        "benchmarks/results/memory.json",
        "--plot",
        "docs/images/memory.png",
        "packages/mpx",
    ]
    said = capsys.readouterr().out
    assert "[9/9] bisect: FAILED with exit status 3" in said
    assert said.endswith("8 of 9 done, results in benchmarks/results.\nFailed: bisect.\n")
    assert rendered == [[]]


def test_quick_results_go_elsewhere(ran, monkeypatch, tmp_path):
    monkeypatch.setattr(render, "main", lambda argv: pytest.fail("wrote the docs"))
    assert command.main(["--quick", "scale"]) == 0
    assert ran[0][2:] == [
        "--quick",
        "--json",
        ".cache/benchmarks/scale.json",
        "--plot",
        ".cache/benchmarks/scale.png",
        "",
    ]
    assert command.main(["--out", "elsewhere", "fp8_memory"]) == 0
    assert ran[-1][-2] == "elsewhere/fp8_memory.json"
    assert (tmp_path / "elsewhere").is_dir()


def test_what_cannot_be_installed_is_left_out(ran, capsys: pytest.CaptureFixture):
    assert command.main(["--quick", "overhead"]) == 0
    assert ran[0][-1] == "packages/mpx"
    assert "jmp is left out: no wheel\n" in capsys.readouterr().out


def test_folders_of_others_come_last(tmp_path: pathlib.Path, monkeypatch):
    (tmp_path / "some_peer.py").write_text("")
    code = "import benchmarks, sys, some_peer; print(sys.path[-1])"
    made = subprocess.run(
        [sys.executable, "-c", code],
        cwd=_suite.ROOT,
        env={**os.environ, PEERS: str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.strip() == str(tmp_path)


def test_the_machine_is_described_and_not_named():
    machine = _report.machine()
    assert machine["cores"] >= 1
    assert machine["memory_gib"] > 0.1
    assert machine["processor"]
    text = str(machine)
    assert platform.node() not in text
    assert "/" not in text
