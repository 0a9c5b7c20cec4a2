"""Reports that were saved, by this version, by another one, or not at all; and how they compare."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

import halfstep
from halfstep import PreflightReport
from halfstep._autocast.f8.product import ELEMENTS
from halfstep._preflight import Argument, Change, Product
from halfstep._preflight.report import saved as _saved
from tests.preflight._entries import GIB, entry, peak
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
    assert not loaded.compare(whole).changed


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
        report().compare(tmp_path / "nowhere.json")
    with pytest.raises(halfstep.PreflightError, match=r"cannot read the report .*directory"):
        report().compare(str(tmp_path))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(halfstep.PreflightError, match="it is not JSON"):
        PreflightReport.load(tmp_path / "binary.json")
    report().to_json(tmp_path / "large.json")
    monkeypatch.setattr(_saved, "LIMIT", 2**10)
    with pytest.raises(halfstep.PreflightError, match="it has more than 0 MiB"):
        PreflightReport.load(tmp_path / "large.json")


def test_a_report_of_an_older_version(tmp_path: pathlib.Path):
    """Compared on what it has; what it lacks is listed."""
    made = report().to_dict()
    _without("arguments", "program", "written")(made["entries"][0])
    del made["entries"][0]["versions"]["halfstep"]
    path = saved(tmp_path / "old.json", made)
    same = report().compare(path)
    assert not same.changed
    lines = str(same).splitlines()
    assert lines[0] == "h100, bf16: nothing changed in what both reports have."
    assert lines[1] == (
        "Not compared: bytes written by dtype (not in the earlier report), arguments one by one "
        "(not in the earlier report), the program's fingerprint (not in the earlier report), "
        "halfstep's version (not in the earlier report)."
    )
    worse = report(peak_bytes=12 * GIB, alias_bytes=GIB).compare(path)
    assert "2.00 GiB fewer arguments: a donation was lost" in str(worse)
    assert "the step" not in str(worse), "nobody can tell"
    assert "version of halfstep" not in str(worse)
    # Without any version, none is compared.
    _without("versions")(made["entries"][0])
    assert "versions (not in the earlier report)" in str(report().compare(saved(path, made)))
    # A later version's fields are passed over.
    made["entries"][0]["color"] = "red"
    assert not report().compare(saved(path, made)).changed


def test_a_compiler_that_gave_up():
    comparison = PreflightReport((entry(**(GAVE_UP | {"target": "h100"})),)).compare(report())
    text = str(comparison)
    assert [row.split() for row in text.splitlines()][1] == ["fits", "yes", "NO"]
    assert "peak (not in the later report)" in text
    assert "the compiler gave up: 37.12G exceeds 15.75G" in text
    with pytest.raises(halfstep.LintError, match=r"does not fit any more: 60.00 GiB are usable"):
        comparison.check(peak=10)
    both = entry(**GAVE_UP)
    assert "peak (neither report has it)" in str(
        PreflightReport((both,)).compare(PreflightReport((both,)))
    )


def test_a_peak_that_is_not_known_any_more():
    lost = report(fits=False).compare(report(fits=False))
    lost.check(peak=0)
    gone = PreflightReport((entry(**(GAVE_UP | {"target": "h100"})),))
    with pytest.raises(halfstep.LintError, match="has no peak in the later report: the compiler"):
        gone.compare(report(fits=False)).check(peak=10)


def test_the_largest_changes_come_first():
    after = report(
        peak_bytes=11 * GIB,
        memory={**FULL.memory, "temporaries": 9 * GIB},
        traffic_bytes=41 * GIB,
        collectives=(),
        flags=(),
        versions={**FULL.versions, "jax": "0.12.0"},
    )
    rows = [change.what for change in after.compare(report()).entries[0].changes]
    assert rows == [
        "peak",
        "memory: temporaries",
        "all-gather bfloat16",
        "traffic",
        "all-gather bfloat16, count",
        "flag --xla_gpu_autotune_level",
        "version of jax",
    ]


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (Change("peak", GIB, 3 * GIB // 2, "bytes"),
         ("1.00 GiB", "1.50 GiB", "+512.00 MiB (+50 %)")),
        (Change("peak", 2, 1, "bytes"), ("2 B", "1 B", "-1 B (-50 %)")),
        (Change("all-gather", 0, 3, "count"), ("0", "3", "+3")),
        (Change("all-gather", 1, 30, "count"), ("1", "30", "+29")),
        (Change("flag", None, "true", "text"), ("-", "true", "")),
        (Change("batch: x", "f", "g", "text", -2048), ("f", "g", "-2.0 KiB")),
        (Change("time bound", 1e-3, 2e-3, "seconds"), ("1 ms", "2 ms", "+1 ms (+100 %)")),
        (Change("FLOPs", 2e9, 1e9, "FLOP"), ("2.00 GFLOP", "1.00 GFLOP", "-1.00 GFLOP (-50 %)")),
    ],
)  # fmt: skip
def test_how_a_change_is_shown(change: Change, texts: tuple[str, str, str]):
    assert change.texts == texts


def test_arguments_that_change_alike_are_one_row():
    many = tuple(
        Argument(f"opt_state/{i}", "optimizer state", "float32", (8,), 32, True) for i in range(5)
    )
    narrow = tuple(dataclasses.replace(one, dtype="bfloat16", bytes=16) for one in many)
    apart = tuple(dataclasses.replace(one, bytes=8) for one in many)
    (change,) = report(arguments=narrow).compare(report(arguments=many)).entries[0].changes
    assert change.what == "optimizer state: opt_state/0 and 4 more"
    assert change.texts == ("float32, donated", "bfloat16, donated", "-80 B")
    # In parts on other devices it is the same array.
    (change,) = report(arguments=apart).compare(report(arguments=many)).entries[0].changes
    assert change.texts[:2] == (
        "float32, 32 B on a device, donated", "float32, 8 B on a device, donated"
    )  # fmt: skip


def test_donation_that_does_nothing():
    """As much is donated, and less is replaced: an output has other bits."""
    text = str(report(alias_bytes=GIB).compare(report()))
    assert "As much is donated, but outputs take the place of 2.00 GiB fewer arguments" in text
    assert "A donation was lost" not in text
    # A smaller state takes its outputs with it, which is no cause of anything.
    smaller = (dataclasses.replace(KEPT[0], bytes=2 * 2**20), KEPT[1])
    text = str(report(arguments=smaller, alias_bytes=3 * GIB - 2 * 2**20).compare(report()))
    assert "As much is donated" not in text
    free = tuple(dataclasses.replace(one, donated=False) for one in KEPT)
    text = str(report().compare(report(arguments=free, alias_bytes=0)))
    assert "A donation is new: params/w may be reused" in text


def test_fp8_that_the_compiler_does_not_make():
    eight = "float8_e4m3fn[8,8]"
    before = Product(eight, eight, "float32[8,8]", 1024, 2, f"{ELEMENTS}/dot_general", "a.py:1")
    after = dataclasses.replace(before, lhs="bfloat16[8,8]", rhs="bfloat16[8,8]")
    comparison = report(products=(after,)).compare(report(products=(before,)))
    assert "Fewer contractions are in fp8: the compiler multiplies in bfloat16 what" in str(
        comparison
    )
    (row,) = (c for c in comparison.entries[0].changes if c.what.startswith("product"))
    assert row.what == "product [8,8] x [8,8] -> [8,8] at a.py:1"


def test_values_that_are_stored_in_another_dtype():
    after = report(
        written={"bfloat16": GIB // 2},
        temp_bytes=5 * GIB,
        memory={**FULL.memory, "temporaries": 5 * GIB},
    )
    assert (
        "Kernels write 512.00 MiB more of bfloat16 and 1.00 GiB less of float32; temporaries fell "
        "by 1.00 GiB."
    ) in str(after.compare(report()))


def test_the_same_figures_from_another_program():
    text = str(report(program="def").compare(report()))
    assert text == "h100, bf16: nothing changed, although the compiler was given another program."


def test_another_halfstep_is_not_another_compiler():
    other = {"halfstep": "0.2.0", "jax": "0.10.2"}
    text = str(report(versions=other, peak_bytes=11 * GIB, program="def").compare(report()))
    assert "halfstep differs, 0.1.0 -> 0.2.0: it can rewrite the step" in text
    assert "The compiler" not in text
    jax = {"halfstep": "0.1.0", "jax": "0.12.0"}
    text = str(report(versions=jax, peak_bytes=11 * GIB).compare(report()))
    assert "The compiler or its settings differ: jax 0.10.2 -> 0.12.0." in text
    assert "The compiler was given the same program" in text


def test_many_changes_are_cut_and_counted():
    estimates = {f"figure {i:03}": float(i + 1) for i in range(100)}
    comparison = report(estimates=estimates).compare(report())
    assert len(comparison.entries[0].changes) == 100
    assert "60 smaller changes are not shown; to_json() has all." in str(comparison)
    assert len(comparison.to_dict()["entries"][0]["changes"]) == 100


def several() -> halfstep.PreflightComparison:
    before = PreflightReport((FULL, dataclasses.replace(FULL, variant="<b>", target="a100-80gb")))
    first, second = before.entries
    grown = dataclasses.replace(first, peak_bytes=20 * GIB)
    return PreflightReport((grown, second)).compare(before)


def test_several_entries_as_text_and_html(tmp_path: pathlib.Path):
    comparison = several()
    head, row = str(comparison).splitlines()[:2]
    assert head.split() == ["target", "step", "what", "before", "after", "change"]
    assert row.split()[:3] == ["h100", "bf16", "peak"]
    assert "a100-80gb, <b>: nothing changed." in str(comparison)
    made = comparison._repr_html_()
    assert "<b>" not in made
    assert "&lt;b&gt;: nothing changed" in made
    assert made.count("color:#d32f2f") == 1, "the peak that grew"
    assert made.count("<tr") == made.count("</tr>") == 2
    assert repr(comparison) == str(comparison)
    text = comparison.to_json(tmp_path / "changes.json")
    assert (tmp_path / "changes.json").read_text() == text + "\n"
    (change,) = json.loads(text)["entries"][0]["changes"]
    assert change == {
        "what": "peak", "before": 10 * GIB, "after": 20 * GIB, "unit": "bytes", "bytes": None,
        "difference": 10 * GIB,
    }  # fmt: skip
    assert json.loads(text)["changed"] is True


def test_every_figure_of_an_entry_is_compared():
    """A field that is added to entries must be compared, or named here."""
    whole = report().to_dict()["entries"][0]
    # Of the device and of how others are shown; what follows from others; the key.
    left_out = {"target", "headroom", "contraction_flops", "f8", "f8_units", "program"}
    changed = {
        "variant": "f32", "devices": 2, "fits": False, "capacity_bytes": 1, "usable_bytes": 1,
        "peak_bytes": 1, "argument_bytes": 1, "output_bytes": 1, "alias_bytes": 1, "temp_bytes": 1,
        "memory": {}, "contractions": (), "products": (), "uncounted": (("kernel", 1),),
        "collectives": (), "traffic_bytes": 1, "estimates": {"flops": 1.0}, "gemm": "library",
        "flags": (), "versions": {"jax": "1"}, "notes": ("a note",), "arguments": (),
        "written": {}, "roofline": dataclasses.replace(FULL.roofline, compute_seconds=1.0)
        if FULL.roofline else None,
        "peak": dataclasses.replace(peak(), buffers=()), "host_bytes": 1,
    }  # fmt: skip
    assert set(changed) | left_out == set(whole)
    recomputed = Product("f32[8]", "f32[8]", "f32[8]", 1, 1, "rematted_computation/dot", "")
    for field, value in changed.items():
        before = report(products=(recomputed,)) if field == "products" else report()
        comparison = report(**{field: value}).compare(before)
        assert comparison.changed, field
