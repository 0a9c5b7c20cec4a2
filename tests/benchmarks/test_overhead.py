"""The bars of the overhead benchmark that are exact: instructions and temporaries."""

import json

import pytest

from benchmarks import _environments, overhead
from benchmarks._report import table

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    import jax

    only = (overhead.REFERENCE, "by hand, select", "halfstep")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        measured = overhead.measure(rounds=0, batch=16, options=overhead.MODEL, only=only)
    return {row["step"]: row for row in measured}


# On every change `tests/test_scale.py` counts the operations of a step before XLA does.
@pytest.mark.slow
def test_instructions_and_temporaries(rows):
    """Beside the step without any gate: at most 15 % more instructions, and 2 % more memory."""
    assert rows["halfstep"]["instruction_ratio"] <= 1.15
    assert rows["halfstep"]["temporary_ratio"] <= 1.02


@pytest.mark.slow
def test_the_bar_can_fail(rows):
    """The usual way, a select for each leaf, is far above it."""
    assert rows["by hand, select"]["instruction_ratio"] > 2
    assert rows["by hand, select"]["temporary_ratio"] > 1.02


def test_instructions_are_counted():
    text = "ENTRY %main (x: f32[2]) -> f32[2] {\n  %x = f32[2] parameter(0)\n"
    text += "  ROOT %add.1 = f32[2] add(%x, %x)\n}\n"
    assert overhead.instructions(text) == 2


def test_table():
    text = table([{"a": 1, "b": "long"}, {"a": None, "b": 2}], {"a": "A", "b": "heading"})
    lines = text.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["|", "A", "|", "heading", "|"]


def test_jaxamp_in_its_own_environment(tmp_path, monkeypatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(overhead, "measure", lambda **_: [])
    given: list[str] = []

    def run(name: str, module: str, argv: list[str], **_: object) -> dict:
        given.extend([name, module, *argv])
        return {"row": {"step": "jaxamp", "time_ratio": 1.1}, "versions": {"jax": "0.6.2"}}

    monkeypatch.setattr(_environments, "run", run)
    made = overhead.main(["--peers", "--rounds", "3", "--batch", "2"])
    assert given[:2] == ["jaxamp", "benchmarks._peers._overhead"]
    assert given[2:] == ["jaxamp", "--rounds", "3", "--batch", "2"]
    assert made["rows"][0]["step"] == "jaxamp, on JAX 0.6.2"

    def missing(*_: object, **__: object) -> dict:
        raise _environments.MissingEnvironmentError("no wheel")

    monkeypatch.setattr(_environments, "run", missing)
    assert overhead.main(["--peers"])["rows"] == []
    assert "jaxamp is left out: no wheel" in capsys.readouterr().out


def test_json(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "measure", lambda **_: [{"step": "x", "time_ratio": 1.0}])
    monkeypatch.setattr("sys.argv", ["overhead", "--json", "out.json"])
    overhead.main(["--json", str(tmp_path / "out.json")])
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["rows"] == [{"step": "x", "time_ratio": 1.0}]
    assert written["versions"]["jax"]
    assert written["command"] == "python -m benchmarks.overhead --json out.json"
