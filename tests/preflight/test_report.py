import json
import pathlib
import re

import pytest

import halfstep
from halfstep._preflight import Contraction
from halfstep._text import seconds, size
from tests.preflight._entries import GIB, entry

UNFIT = {"fits": False, "peak_bytes": 70 * GIB, "temp_bytes": 66 * GIB}
GAVE_UP = {
    "target": "v5e",
    "fits": False,
    "peak_bytes": None,
    "argument_bytes": None,
    "output_bytes": None,
    "alias_bytes": None,
    "temp_bytes": None,
    "contractions": None,
    "products": None,
    "collectives": None,
    "traffic_bytes": None,
    "roofline": None,
    "gemm": None,
    "notes": ("the compiler gave up: 37.12G exceeds 15.75G",),
    "hlo": "",
}


def report() -> halfstep.PreflightReport:
    return halfstep.PreflightReport(
        (
            entry(),
            entry(variant="f32", **UNFIT),
            entry(**GAVE_UP),
            entry(**(GAVE_UP | {"variant": "f32"})),
        )
    )


def test_an_entry_by_target_and_variant():
    assert report()["h100", "f32"].fits is False
    assert halfstep.PreflightReport((entry(),))["h100"].fits is True
    assert report().targets == ("h100", "v5e")
    assert report().variants == ("bf16", "f32")


@pytest.mark.parametrize(
    ("key", "message"),
    [("h100", r"write report\['h100', 'bf16'\]"), ("a100", "give one of the targets"),
     (("h100", "f16"), "the variants .'bf16', 'f32'.")],
)  # fmt: skip
def test_a_key_that_names_no_single_entry(key: str | tuple[str, str], message: str):
    with pytest.raises(KeyError, match=message):
        report()[key]


def test_headroom():
    assert entry().headroom == 50 * GIB
    assert entry(**UNFIT).headroom == -10 * GIB
    assert entry(**GAVE_UP).headroom is None


def test_table_is_aligned_and_complete():
    lines = str(report()).splitlines()
    head, rows = lines[0], lines[1:5]
    for heading in ("fits", "peak", "usable"):
        at = head.index(heading) + len(heading)
        # Columns of numbers end where their headings do.
        if heading != "fits":
            assert all(row[:at].rstrip() == row[:at] for row in rows), heading
    assert "10.00 GiB" in rows[0]
    assert re.search(r"\bNO\b.*-10\.00 GiB", rows[1])
    assert ">= 4 ms (compute)" in rows[0]
    assert "bfloat16 75 %, float32 25 %" in rows[0]
    assert "all-gather" in str(report())
    assert "the compiler gave up" in str(report())
    assert "no run can be faster" in str(report())


def test_what_the_compiler_did_not_say_is_absent():
    row = next(line for line in str(report()).splitlines() if line.startswith("v5e"))
    assert re.search(r"NO\s+-\s+60\.00 GiB\s+-\s+-\s+-\s+-$", row)
    shown = entry(**GAVE_UP).to_dict()
    for name in ("peak_bytes", "roofline", "traffic_bytes", "contraction_flops", "headroom"):
        assert shown[name] is None, name


def test_shares_are_not_rounded_to_all_or_nothing():
    nearly = (
        Contraction("bfloat16", "bfloat16", "float32", 10**15, 1),
        Contraction("float32", "float32", "float32", 1, 1),
    )
    assert "bfloat16 >99.9 %, float32 <0.1 %" in str(
        halfstep.PreflightReport((entry(contractions=nearly),))
    )


def test_json(tmp_path: pathlib.Path):
    path = tmp_path / "report.json"
    text = report().to_json(path)
    assert path.read_text() == text + "\n"
    first = json.loads(text)["entries"][0]
    assert first["roofline"]["label"] == "lower bound of the step time"
    assert first["roofline"]["bound_seconds"] == 4e-3
    assert first["contraction_flops"] == {"bfloat16": 3 * 10**12, "float32": 10**12}
    assert first["collectives"] == [
        {"kind": "all-gather", "dtype": "bfloat16", "bytes": 2 * GIB, "count": 24}
    ]
    assert first["headroom"] == 50 * GIB
    assert first["versions"] == {"jax": "0.10.2"}
    assert "hlo" not in first


def test_html_escapes_and_marks_what_does_not_fit():
    made = halfstep.PreflightReport((entry(variant="<b>"), entry(variant="f32", **UNFIT)))
    text = made._repr_html_()
    assert "<b>" not in text
    assert "&lt;b&gt;" in text
    assert text.count("color:#d32f2f") == 1
    assert repr(made) == str(made)
    assert text.count("<tr") == text.count("</tr>")


def test_plot(tmp_path: pathlib.Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "report.png"
    report().plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    halfstep.PreflightReport((entry(**GAVE_UP),)).plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_require_fit():
    halfstep.PreflightReport((entry(),)).require_fit()
    with pytest.raises(halfstep.DoesNotFitError) as error:
        report().require_fit()
    message = str(error.value)
    assert "f32 does not fit on h100: it needs 70.00 GiB of 60.00 GiB usable" in message
    assert "Most is temporaries" in message
    assert "microbatches=" in message
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in message, "80 GiB would hold it"
    assert "v5e: usable are 60.00 GiB; the compiler gave up" in message


def test_detail_shows_every_figure():
    text = report().detail()
    for part in ("memory: optimizer state", "contraction: bfloat16 x bfloat16 -> float32",
                 "--xla_gpu_autotune_level=0", "jax 0.10.2", "3.00 TFLOP in 12"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (2048, "2.0 KiB"), (5 * 2**20, "5.00 MiB"),
     (-3 * 2**29, "-1.50 GiB"), (2**41, "2.00 TiB"), (None, "-")],
)  # fmt: skip
def test_sizes(count: int | None, text: str):
    assert size(count) == text


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.5 s"), (4e-3, "4 ms"), (5e-7, "500 ns")])
def test_times(value: float, text: str):
    assert seconds(value) == text
