"""Every report is text, valid JSON and HTML; a row for each kind of report."""

import html.parser
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep import debug
from tests.preflight._entries import entry

pytestmark = pytest.mark.core

W, X = jnp.eye(4), jnp.ones((2, 4))


def explained() -> halfstep.Report:
    """With values, of which some are infinite."""
    return halfstep.explain(lambda w, x: x @ w, "f16", values=True)(W * 1e30, X * 1e30)


def recorded() -> halfstep.Report:
    recorder = debug.record(lambda x: jnp.log(x))
    log, _ = recorder(recorder.init(X), -X)
    return log.report()


def first_nonfinite() -> halfstep.Report:
    found = debug.first_nonfinite(lambda x: jnp.exp(x), X * 1e3)
    assert found is not None
    return found


def compared() -> halfstep.Report:
    """In float16 the result is infinite, and so is its error."""
    return debug.compare(lambda w, x: jnp.sum(x @ w), "f16")(W * 1e5, X * 1e5)


def bisected() -> halfstep.Report:
    def loss(w: Any, x: Any) -> Any:
        with jax.named_scope("layer"):
            return jnp.mean(x @ w * 1e5)

    return debug.bisect(loss, [(W, X)], "f16,op:*=compute", tolerance=0.05, progress=False)


def live() -> halfstep.Report:
    made = debug.Live()
    made.update(0, loss=jnp.array(1.0))
    made.update(1, loss=jnp.array(jnp.inf))
    return made


def preflight() -> halfstep.PreflightReport:
    return halfstep.PreflightReport((entry(),))


ROWS: dict[str, Callable[[], halfstep.Report]] = {
    "explain": explained,
    "record": recorded,
    "first_nonfinite": first_nonfinite,
    "compare": compared,
    "bisect": bisected,
    "Live": live,
    "preflight": preflight,
    "largest_batch": lambda: halfstep.LargestBatch(8, entry(), {8: entry(), 16: entry()}),
}
every_row = pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)


def refuse(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.rows(6)
@every_row
def test_json_is_valid_and_is_what_is_written(
    make: Callable[[], halfstep.Report], tmp_path: pathlib.Path
):
    report = make()
    text = report.to_json(tmp_path / "report.json")
    read = json.loads(text, parse_constant=refuse)
    assert read.keys() == report.to_dict().keys()
    assert json.loads((tmp_path / "report.json").read_text()) == read
    assert report.to_json() == text


@pytest.mark.parametrize("make", [explained, compared, bisected, live])
def test_what_is_not_finite_is_text(make: Callable[[], halfstep.Report]):
    assert '"inf"' in make().to_json()


@every_row
def test_text_has_no_trailing_spaces_and_is_the_repr(make: Callable[[], halfstep.Report]):
    report = make()
    text = str(report)
    assert text.strip()
    assert [line for line in text.splitlines() if line != line.rstrip()] == []
    assert repr(report) == str(report)


class Balance(html.parser.HTMLParser):
    """Elements that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@every_row
def test_html_is_closed_and_scrolls(make: Callable[[], halfstep.Report]):
    text = make()._repr_html_()
    parser = Balance()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    assert "overflow-x:auto" in text
