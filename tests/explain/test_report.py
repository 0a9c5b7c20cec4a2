"""What a report shows: text, HTML, JSON, and what `check` raises."""

import html.parser
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from tests.explain._functions import W, X, asks_for_precision, float32_argument


def model(w: Any, x: Any) -> Any:
    with jax.named_scope("head"):
        return jnp.sum(jax.nn.softmax(x @ w) @ w)


def test_text():
    report = halfstep.explain(model)(W, X)
    text = str(report)
    assert "contractions          8.59 GFLOP: bf16 100 %" in text
    assert "findings              none" in text
    assert "  dot_general  bf16 -> bf16  compute" in text
    assert "float32*  powers, exponentials" in text
    assert "test_report.py:" in text
    assert "* in a float32 island" in text
    assert max(map(len, text.splitlines())) <= 120


def test_operations_of_one_line_and_dtype_are_one_row():
    report = halfstep.explain(model)(W, X)
    (row,) = [line for line in report.table().splitlines() if "dot_general" in line]
    assert row.split()[-5:] == ["2", "8.59", "G", "8.00", "MiB"]
    full = [line for line in report.table(full=True).splitlines() if "dot_general" in line]
    assert len(full) == 2
    assert "bf16[2048,1024], bf16[1024,1024] -> bf16[2048,1024]" in full[0]


def test_the_full_table_has_every_operation():
    report = halfstep.explain(model)(W, X)
    rows = [line for line in report.table(full=True).splitlines() if line.startswith("  ")]
    # And the headings.
    assert len(rows) == len(report.operations) + 1


def test_the_findings_are_in_the_text():
    report = halfstep.explain(float32_argument)(W, X, X)
    (finding,) = report.findings
    assert str(finding) in str(report)
    assert "Fix: cast it where it is used" in str(finding)
    assert "_functions.py:" in str(finding)


def test_json(tmp_path: pathlib.Path):
    report = halfstep.explain(float32_argument)(W, X, X)
    text = report.to_json(tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert read == json.loads(text)
    assert len(read["operations"]) == len(report.operations)
    assert read["findings"][0]["source"]["line"] == report.findings[0].source.line
    assert read["totals"]["low"] == 1
    assert read["operations"][0].keys() >= {"source", "scope", "ins", "outs", "rule", "flops"}


class Balanced(html.parser.HTMLParser):
    """Sees that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_html():
    report = halfstep.explain(float32_argument)(W, X, X)
    parser = Balanced()
    parser.feed(report._repr_html_())
    assert parser.open == []
    assert "promotion" in parser.text
    assert "bf16 -> bf16" in parser.text
    assert "->" not in report._repr_html_()
    # What a shell shows of a value.
    assert repr(report) == str(report)


def test_check_passes():
    halfstep.explain(model)(W, X).check(low=1.0, max_findings=0)


def test_check_lists_what_misses():
    report = halfstep.explain(asks_for_precision)(W, X)
    with pytest.raises(halfstep.LintError, match="precision=HIGHEST is asked for") as caught:
        report.check()
    message = str(caught.value)
    assert (
        "required: 99 % of the contractions' FLOPs in bf16; asks_for_precision has 0 %" in message
    )
    assert "required: no findings; asks_for_precision has 1:" in message
    assert "_functions.py:" in message


def test_check_can_be_lenient():
    report = halfstep.explain(asks_for_precision)(W, X)
    report.check(low=0, max_findings=1)
    with pytest.raises(halfstep.LintError, match="has 0 %"):
        report.check(max_findings=1)
    with pytest.raises(halfstep.LintError, match="no findings"):
        report.check(low=0)


def test_the_operations_of_a_line():
    report = halfstep.explain(model)(W, X)
    line = next(e.source.line for e in report.operations if e.name == "exp")
    assert {e.name for e in report.at(f"test_report.py:{line}")} > {"exp", "dot_general"}
    assert len(report.at("explain/test_report.py")) == len(report.operations)
    assert report.at("test_report.py:1") == report.at("report.py") == ()
