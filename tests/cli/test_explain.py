"""`halfstep explain`: what `lint` shows, without a judgement."""

import json
import pathlib
import sys

import pytest

from halfstep.cli import main

LOSSES = "tests.cli._losses"


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command adds to the path; here it does so for one test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_findings_are_no_no(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", f"{LOSSES}:faulty"]) == 0
    explained = capsys.readouterr()
    assert explained.err == ""
    assert main(["lint", f"{LOSSES}:faulty"]) == 1
    assert explained.out == capsys.readouterr().out
    assert "precision=HIGHEST is asked for" in explained.out


def test_everything(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path):
    page = tmp_path / "page.html"
    assert main(["explain", f"{LOSSES}:clean", "--full", "--html", str(page)]) == 0
    assert "bf16[1024,1024], bf16[1024,1024] -> bf16[1024,1024]" in capsys.readouterr().out
    assert "<title>halfstep explain</title>" in page.read_text()
    assert main(["explain", f"{LOSSES}:clean", "--policy", "f16", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["policy"] == "p=f32,c=f16,o=f32"
    assert captured.err == "made a loss\n"


def test_no_answer(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", f"{LOSSES}:with_depth"]) == 2
    assert "Give its parameters defaults" in capsys.readouterr().err
    assert main(["explain", "make_loss"]) == 2
    assert "given as module:function or file.py:function" in capsys.readouterr().err
    assert main(["explain", f"{LOSSES}:fails", "--json", "no/such/folder.json"]) == 2
    assert "there is no folder" in capsys.readouterr().err
