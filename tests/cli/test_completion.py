"""`halfstep completion`, in a real bash."""

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

    commands = ["explain", "lint", "bisect", "replay", "preflight", "formats", "doctor"]
    assert tab("") == [*commands, "completion"]
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


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_syntax_of_other_shells(shell: str, scripts: dict[str, str], tmp_path: pathlib.Path):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    (tmp_path / "script").write_text(scripts[shell])
    subprocess.run([shell, "-n", "script"], cwd=tmp_path, check=True)


def test_without_shtab(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert 'pip install "halfstep[completion]"' in capsys.readouterr().err
