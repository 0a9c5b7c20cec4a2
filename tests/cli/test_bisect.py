"""`halfstep bisect`, from the command line."""

import json
import pathlib
import sys

import pytest

from halfstep import Policy
from halfstep.cli import main

LOSSES = "tests.cli._losses"


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command adds to the path; here it does so for one test."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_what_is_needed(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path):
    path = tmp_path / "policy.toml"
    assert main(["bisect", f"{LOSSES}:squares", "--output", str(path), "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["before"] == "inf"
    assert found["error"] < 0.01
    assert "op:square@spread=float32" in [one["rule"] for one in found["needed"]]
    assert str(Policy.load(path)) == found["policy"]
    # The policy that was written is good.
    assert main(["bisect", f"{LOSSES}:squares", "--policy", str(path)]) == 0
    assert "nothing is needed" in capsys.readouterr().out
    assert main(["bisect", f"{LOSSES}:squares", "--scopes"]) == 1
    assert "scope:spread=float32" in capsys.readouterr().out
    # Other commands read it, too, and have something to say about it.
    capsys.readouterr()
    assert main(["lint", f"{LOSSES}:squares_of_one", "--policy", str(path), "--low", "0"]) == 1
    assert "op:square@spread=float32" in capsys.readouterr().out


def test_errors(capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path):
    assert main(["bisect", f"{LOSSES}:squares", "--tolerance", "-1"]) == 2
    assert "required an error of at most -1" in capsys.readouterr().err
    assert main(["bisect", f"{LOSSES}:a_list_of_arrays"]) == 2
    assert "one for each batch, such as [(params, batch), ...]" in capsys.readouterr().err
    assert main(["bisect", f"{LOSSES}:squares", "--output", str(tmp_path / "no" / "x.toml")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["bisect", f"{LOSSES}:squares", "--policy", str(tmp_path / "none.toml")])
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "bad.toml").write_text('comptue = "f16"\n')
    with pytest.raises(SystemExit, match="2"):
        main(["bisect", f"{LOSSES}:squares", "--policy", str(tmp_path / "bad.toml")])
    assert "bad.toml says 'comptue', which no policy has" in capsys.readouterr().err
