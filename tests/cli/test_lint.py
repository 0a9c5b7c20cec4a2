"""`halfstep lint`, as CI calls it."""

import json
import pathlib
import subprocess
import sys

import pytest

from halfstep.cli import main

ROOT = pathlib.Path(__file__).parents[2]
LOSSES = "tests.cli._losses"


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command adds to the path; here it does so for one test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_clean_function(capsys: pytest.CaptureFixture[str]):
    assert main(["lint", f"{LOSSES}:clean"]) == 0
    out = capsys.readouterr().out
    assert "findings              none" in out
    assert "contractions          2.15 GFLOP: bf16 100 %" in out


def test_findings_are_a_no(capsys: pytest.CaptureFixture[str]):
    assert main(["lint", f"{LOSSES}:faulty"]) == 1
    captured = capsys.readouterr()
    assert "_losses.py:" in captured.out
    assert "precision=HIGHEST is asked for" in captured.out
    assert captured.err.splitlines() == [
        "required: 99 % of the contractions' FLOPs in bf16; loss has 50 %",
        "required: no findings; loss has 1",
    ]


def test_what_is_required_can_be_less():
    assert main(["lint", f"{LOSSES}:faulty", "--low", "0.5", "--max-findings", "1"]) == 0
    assert main(["lint", f"{LOSSES}:faulty", "--low", "0.5"]) == 1
    assert main(["lint", f"{LOSSES}:faulty", "--max-findings", "1"]) == 1


def test_the_threshold():
    command = ["lint", f"{LOSSES}:faulty", "--low", "0.5"]
    assert main([*command, "--min-bytes", str(2**30)]) == 0


def test_a_policy(capsys: pytest.CaptureFixture[str]):
    assert main(["lint", f"{LOSSES}:clean", "--policy", "f16"]) == 0
    assert "f16 100 %" in capsys.readouterr().out


def test_what_must_be_in_8_bits(capsys: pytest.CaptureFixture[str]):
    command = ["lint", f"{LOSSES}:clean", "--policy", "f8", "--f8", "1"]
    assert main(command) == 0
    assert "1 of 1 contraction (100 % of the FLOPs)" in capsys.readouterr().out
    command[1] = f"{LOSSES}:faulty"
    assert main([*command, "--low", "0", "--max-findings", "1"]) == 1
    required, where, fix = capsys.readouterr().err.splitlines()
    assert required == "required: 100 % of the eligible contractions' FLOPs in fp8; loss has 50 %:"
    assert where.endswith("f32[1024,1024] x f32[1024,1024] by w: precision=HIGHEST is asked for")
    assert fix == "    Fix: leave `precision=` out."


def test_values(capsys: pytest.CaptureFixture[str]):
    command = ["lint", f"{LOSSES}:beyond_float16", "--policy", "f16"]
    assert main(command) == 0
    assert main([*command, "--values"]) == 1
    assert "op:dot_general=accumulate" in capsys.readouterr().out


def test_all_operations(capsys: pytest.CaptureFixture[str]):
    assert main(["lint", f"{LOSSES}:clean", "--full"]) == 0
    assert "bf16[1024,1024], bf16[1024,1024] -> bf16[1024,1024]" in capsys.readouterr().out


def test_json_on_standard_output(capsys: pytest.CaptureFixture[str]):
    assert main(["lint", f"{LOSSES}:clean", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["findings"] == []
    assert captured.err == "made a loss\n"


def test_files(tmp_path: pathlib.Path):
    files = [f"--json={tmp_path / 'a.json'}", f"--html={tmp_path / 'a.html'}"]
    assert main(["lint", f"{LOSSES}:faulty", *files]) == 1
    assert json.loads((tmp_path / "a.json").read_text())["findings"][0]["count"] == 1
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "contraction not lowered" in page


def test_a_file_that_cannot_be_written_is_said_at_once(capsys: pytest.CaptureFixture[str]):
    assert main(["lint", f"{LOSSES}:fails", "--html", "no/such/folder.html"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["lint", f"{LOSSES}:fails", "--html", "page.txt"]) == 2
    assert "must end in .html" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("only_a_loss", "must return a loss and a tuple of its arguments, (loss, args)"),
        ("bare_argument", "got a ShapeDtypeStruct instead of the tuple"),
        ("with_depth", "is called without arguments; its signature is (depth: int)"),
        ("missing", "must have a function 'missing'; it has none of that name"),
        ("fails", "no answer, because of the error above"),
    ],
)
def test_no_answer(name: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["lint", f"{LOSSES}:{name}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--low", "2"], "required a share from 0 to 1; got '2'"),
        (["--policy", "bf15"], "unknown format 'bf15'"),
    ],
)
def test_options_that_make_no_sense(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit, match="2"):
        main(["lint", f"{LOSSES}:clean", *options])
    assert message in capsys.readouterr().err


def test_as_a_command(tmp_path: pathlib.Path):
    (tmp_path / "my_loss.py").write_text((ROOT / "tests" / "cli" / "_losses.py").read_text())
    command = [sys.executable, "-m", "halfstep", "lint", "my_loss.py:faulty"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    lines = (tmp_path / "my_loss.py").read_text().splitlines()
    number = 1 + next(n for n, line in enumerate(lines) if "precision=" in line)
    assert f"my_loss.py:{number} loss: contraction not lowered" in done.stdout


def test_a_name_that_is_nearly_right(capsys: pytest.CaptureFixture[str]):
    assert main(["lint", f"{LOSSES}:clea"]) == 2
    assert "it has none of that name. Did you mean 'clean'?" in capsys.readouterr().err
