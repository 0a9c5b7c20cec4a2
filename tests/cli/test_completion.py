"""`halfstep completion`, in real shells: those that are installed."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from halfstep.cli import main

pytest.importorskip("shtab")

# What bash does when Tab is pressed: the words, and which of them is being written.
TAB = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
[[ $(complete -p halfstep) =~ -F\\ ([^ ]+) ]] && "${BASH_REMATCH[1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""
# zsh completes in a terminal only: in one of its own, until its screen shows what is awaited.
ZSH_TAB = r"""
zmodload zsh/zpty
zpty terminal 'TERM=dumb zsh -f -i'
zpty -w terminal 'fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -d ./dump'
zpty -w terminal "echo rea''dy"
zpty -r terminal screen '*ready*'
zpty -w -n terminal "$1"$'\t'
zpty -r -m terminal screen "*$2*"
zpty -d terminal
"""
COMMANDS = [
    *("explain", "lint", "bisect", "replay", "preflight", "plan", "formats", "examples", "doctor"),
    "completion",
]


@pytest.fixture
def scripts(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """What the command prints for each shell."""
    made = {}
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        made[shell] = capsys.readouterr().out
    return made


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_in_bash(scripts: dict[str, str], tmp_path: pathlib.Path):
    (tmp_path / "script").write_text(scripts["bash"])
    (tmp_path / "train.py").touch()
    (tmp_path / "captures").mkdir()

    def tab(*words: str) -> list[str]:
        command = ["bash", "--norc", "-c", TAB, "bash", "./script", "halfstep", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    assert tab("") == COMMANDS
    assert tab("pre") == ["preflight"]
    assert tab("doctor", "--") == ["--help", "--devices", "--json"]
    assert tab("preflight", "train.py:make", "--gemm", "") == ["auto", "triton", "library"]
    assert tab("completion", "") == ["bash", "zsh", "fish"]
    assert tab("lint", "tr") == ["train.py"]
    assert tab("formats", "--json", "tr") == ["train.py"]
    assert tab("replay", "c") == ["captures"]


def test_other_shells(scripts: dict[str, str]):
    assert scripts["zsh"].startswith("#compdef halfstep\n")
    assert "complete -c halfstep" in scripts["fish"]
    assert all("--memory-fraction" in scripts[shell] for shell in ("bash", "zsh"))
    assert "memory-fraction" in scripts["fish"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish")
def test_in_fish(scripts: dict[str, str], tmp_path: pathlib.Path):
    (tmp_path / "script").write_text(scripts["fish"])
    (tmp_path / "train.py").touch()

    def tab(line: str) -> list[str]:
        command = ["fish", "--no-config", "-c", f"source script; complete -C '{line}'"]
        environment = {**os.environ, "HOME": str(tmp_path)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return [answer.partition("\t")[0] for answer in done.stdout.splitlines()]

    assert set(COMMANDS) <= set(tab("halfstep "))
    assert tab("halfstep pre") == ["preflight"]
    assert {"--devices", "--json"} <= set(tab("halfstep doctor --"))
    assert tab("halfstep lint tr") == ["train.py"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh")
def test_in_zsh(scripts: dict[str, str], tmp_path: pathlib.Path):
    (tmp_path / "_halfstep").write_text(scripts["zsh"])
    (tmp_path / "train.py").touch()

    def expect(line: str, shown: str) -> None:
        command = ["zsh", "-f", "-c", ZSH_TAB, "zsh", line, shown]
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)

    expect("halfstep ", "*".join(sorted(COMMANDS)))
    expect("halfstep pre", "halfstep preflight")
    expect("halfstep doctor --", "--devices*--json")
    expect("halfstep lint tr", "halfstep lint train.py")


def test_without_shtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert 'pip install "halfstep[completion]"' in capsys.readouterr().err
