"""Reports that were saved, by this version, by another one, or not at all."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

import halfstep
from halfstep import PreflightReport
from halfstep._preflight import Argument
from halfstep._preflight.report import saved as _saved
from tests._rows import slow_unless
from tests.preflight._compilers import need
from tests.preflight._entries import GIB, entry, peak
from tests.preflight._steps import Step, in_f8, momentum, over_four
from tests.preflight.test_report import GAVE_UP

KEPT = (
    Argument("params/w", "parameters", "float32", (1024, 1024), 4 * 2**20, True),
    Argument("x", "batch", "float32", (64, 1024), 2**18, False),
)
FULL = entry(
    arguments=KEPT,
    program="abc",
    written={"float32": GIB},
    host_bytes=0,
    versions={"halfstep": "0.1.0", "jax": "0.10.2"},
    peak=peak(),
)


def report(**changes: Any) -> PreflightReport:
    return PreflightReport((dataclasses.replace(FULL, **changes),))


def saved(path: pathlib.Path, made: Any) -> pathlib.Path:
    path.write_text(made if isinstance(made, str) else json.dumps(made))
    return path


def test_a_report_comes_back_as_it_was(tmp_path: pathlib.Path):
    whole = PreflightReport((FULL, entry(**(GAVE_UP | {"arguments": KEPT}))))
    whole.to_json(tmp_path / "report.json")
    loaded = PreflightReport.load(tmp_path / "report.json")
    assert loaded.entries == whole.entries
    assert (loaded.entries[0].hlo, loaded.entries[0].proto) == ("", b"")
    assert str(loaded) == str(whole)
    assert loaded.detail() == whole.detail()


def _without(*names: str) -> Callable[[dict[str, Any]], None]:
    def edit(made: dict[str, Any]) -> None:
        for name in names:
            del made[name]

    return edit


def _with(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda made: made.update({name: value})


NO_REPORTS: dict[str, tuple[Any, str]] = {
    "nothing": ("", r"it is not JSON \(Expecting value"),
    "text": ("target  fits", r"it is not JSON \(Expecting value"),
    "too deep": ("[" * 100_000, r"it is not JSON \("),
    "a number": ("3", 'it has no list "entries" with an entry in it'),
    "another file": ({"policy": "bf16"}, 'it has no list "entries" with an entry in it'),
    "no entry": ({"entries": []}, 'it has no list "entries" with an entry in it'),
    "an entry that is a text": ({"entries": ["h100"]}, r"entries\[0\] must be an object; got str"),
    "no target": (_without("target"), r"entries\[0\] has no 'target'"),
    "no flags": (_without("flags"), r"entries\[0\] has no 'flags'"),
    "a text as bytes": (
        _with("peak_bytes", "10"),
        r"entries\[0\].peak_bytes must be an integer; got str '10'",
    ),
    "half a byte": (_with("temp_bytes", 0.5), "temp_bytes must be an integer; got float 0.5"),
    "no truth": (_with("fits", 1), "fits must be true or false; got int 1"),
    "true bytes": (_with("peak_bytes", True), "peak_bytes must be an integer; got bool True"),
    "too large": (_with("peak_bytes", 10**400), r"peak_bytes must be a finite number below 2\*\*"),
    "infinite": (_with("estimates", {"flops": float("inf")}), "estimates.flops must be a finite"),
    "no number": (_with("estimates", {"flops": float("nan")}), "estimates.flops must be a finite"),
    "a list as roles": (_with("memory", [1]), r"memory must be an object; got list \[1\]"),
    "a text as flags": (_with("flags", "-O3"), "flags must be a list; got str '-O3'"),
    "a pair of three": (_with("uncounted", [["a", 1, 2]]), r"uncounted\[0\] must be a list of 2"),
    "half a collective": (
        _with("collectives", [{"kind": "all-gather"}]),
        r"entries\[0\].collectives\[0\] has no 'dtype'",
    ),
}


@pytest.mark.parametrize("name", NO_REPORTS)
def test_what_is_not_a_report_is_refused(name: str, tmp_path: pathlib.Path):
    made, message = NO_REPORTS[name]
    if callable(made):
        whole = report().to_dict()
        made(whole["entries"][0])
        made = whole
    path = saved(tmp_path / "some.json", made)
    with pytest.raises(halfstep.PreflightError, match=message) as error:
        PreflightReport.load(path)
    assert str(error.value).startswith(f"{str(path)!r} is not a preflight report: ")
    assert str(error.value).endswith(
        "Give a file that report.to_json(path) or halfstep preflight --json FILE has written."
    )
    assert len(str(error.value)) < 500 + len(str(path))


def test_files_that_cannot_be_read(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(halfstep.PreflightError, match=r"cannot read the report .*No such file"):
        PreflightReport.load(tmp_path / "nowhere.json")
    with pytest.raises(halfstep.PreflightError, match=r"cannot read the report .*directory"):
        PreflightReport.load(str(tmp_path))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(halfstep.PreflightError, match="it is not JSON"):
        PreflightReport.load(tmp_path / "binary.json")
    report().to_json(tmp_path / "large.json")
    monkeypatch.setattr(_saved, "LIMIT", 2**10)
    with pytest.raises(halfstep.PreflightError, match="it has more than 0 MiB"):
        PreflightReport.load(tmp_path / "large.json")


def test_a_report_of_an_older_version(tmp_path: pathlib.Path):
    """What it lacks is `None` or empty, and what a later version added is passed over."""
    made = report().to_dict()
    _without("arguments", "program", "written", "versions")(made["entries"][0])
    made["entries"][0]["color"] = "red"
    loaded = PreflightReport.load(saved(tmp_path / "old.json", made))
    lacking = {"arguments": None, "program": None, "written": None, "versions": {}}
    assert loaded == report(**lacking)


# As compilers made them: products in both formats, collectives, and a TPU's own figures.
COMPILED: dict[str, tuple[Callable[[], Step], str, tuple[int, ...]]] = {
    "momentum": (momentum, "h100", (0, 1)),
    "f8": (in_f8, "h100", (0, 1)),
    "collectives": (over_four, "h100:1x4", ()),
    "TPU": (momentum, "v5e", (0, 1)),
}


@pytest.mark.parametrize("name", slow_unless(COMPILED, lambda name: name == "momentum"))
def test_a_compiled_report_comes_back_as_it_was(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    make, target, donate = COMPILED[name]
    need("tpu" if name == "TPU" else "cuda")
    monkeypatch.setenv("HALFSTEP_CACHE_DIR", str(tmp_path / "cache"))
    made = halfstep.preflight(
        *make(), targets=target, donate_argnums=donate, progress=False, cache=False
    )
    made.to_json(tmp_path / "report.json")
    loaded = PreflightReport.load(tmp_path / "report.json")
    assert loaded.entries == made.entries
    assert loaded.to_json() == made.to_json()
    # Another compile of the same step says the same, so that any difference has a cause.
    again = halfstep.preflight(
        *make(), targets=target, donate_argnums=donate, progress=False, cache=False
    )
    assert again.to_json() == made.to_json()
