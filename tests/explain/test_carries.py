"""Rows of what loops carry: each reading, its reason, its line, and the rule that changes it."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep

D = 4


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


PARAMS = {"w": shape(D, D), "stack": shape(200, D, D), "decay": shape(D)}
DATA = shape(300, D)


def average(params: Any, data: Any) -> Any:
    def step(mean: Any, new: Any) -> Any:
        return params["decay"] * mean + new @ params["w"], mean

    return jax.lax.scan(step, jnp.zeros(D), data)[1].sum()


def layers(params: Any, data: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(h @ w), None

    return jax.lax.scan(layer, data @ params["w"], params["stack"])[0].sum()


def leaky(params: Any, data: Any, length: int = 100) -> Any:
    def leak(h: Any, _: Any) -> Any:
        return 0.9 * h + jnp.tanh(h @ params["w"]), None

    return jax.lax.scan(leak, data @ params["w"], None, length=length)[0].sum()


def recurrent(params: Any, data: Any) -> Any:
    def cell(h: Any, x: Any) -> Any:
        return jnp.tanh((h + x) @ params["w"]), None

    return jax.lax.scan(cell, jnp.zeros(D), data)[0].sum()


def until(params: Any, data: Any) -> Any:
    def more(h: Any) -> Any:
        return jnp.tanh(h @ params["w"])

    return jax.lax.while_loop(lambda h: h.sum() < 3, more, data @ params["w"]).sum()


def before(params: Any, data: Any) -> Any:
    def pair(last: Any, new: Any) -> Any:
        return new @ params["w"], last * new

    return jax.lax.scan(pair, jnp.zeros(D), data)[1].sum()


@pytest.mark.parametrize(
    ("func", "name", "reading", "dtype", "reason"),
    [
        (average, "mean", "state", "f32", "reaches itself without a matrix product"),
        (layers, "h", "activation", "bf16", "weights of its own"),
        (leaky, "h", "activation", "bf16", "adds up over 100 iterations, fewer than 128"),
        (recurrent, "h", "activation", "bf16", "only through matrix products"),
        (until, "h", "state", "f32", "nobody knows how often"),
        (before, "last", "neither", "bf16", "makes it anew"),
    ],
)
def test_each_carry_has_a_row(func: Any, name: str, reading: str, dtype: str, reason: str):
    report = halfstep.explain(func, "bf16")(PARAMS, DATA)
    (carry,) = report.carries
    assert (carry.name, carry.reading, carry.type.dtype) == (name, reading, dtype)
    assert reason in carry.reason
    assert carry.source.file.endswith("test_carries.py")
    assert carry.loop.startswith("while" if func is until else "scan x")
    table = report.carry_table()
    assert carry.rule in table
    assert carry.source.short in table
    assert carry.reason in table
    assert table in str(report)
    assert json.loads(report.to_json())["carries"][0]["reading"] == reading
    assert carry.rule in report._repr_html_()


@pytest.mark.parametrize("func", [average, layers, leaky, recurrent, until])
def test_the_rule_of_a_row_changes_it(func: Any):
    (before,) = halfstep.explain(func, "bf16")(PARAMS, DATA).carries
    (after,) = halfstep.explain(func, f"bf16,{before.rule}")(PARAMS, DATA).carries
    assert {before.reading, after.reading} == {"state", "activation"}
    assert after.by == before.rule
    assert before.rule in after.reason
    assert {before.type.dtype, after.type.dtype} == {"f32", "bf16"}


def test_a_report_without_loops_has_no_rows():
    report = halfstep.explain(lambda params, data: (data @ params["w"]).sum(), "bf16")(PARAMS, DATA)
    assert report.carries == ()
    assert "read as" not in str(report) + report._repr_html_()


def test_loops_are_named_by_function_or_scope():
    def scoped(params: Any, data: Any) -> Any:
        with jax.named_scope("filter"):
            return average(params, data) + leaky(params, data)

    for rule, expected in (
        ("loop:step=activation", {"mean": "activation", "h": "activation"}),
        ("loop:le*=state", {"mean": "state", "h": "state"}),
        ("scope:filter=state", {"mean": "state", "h": "state"}),
        ("loop:leak@filter=state", {"mean": "state", "h": "state"}),
    ):
        report = halfstep.explain(scoped, f"bf16,{rule}")(PARAMS, DATA)
        assert {carry.name: carry.reading for carry in report.carries} == expected
    with pytest.raises(ValueError, match=r"'loop:leek=state'.*functions of loops: 'leak'"):
        halfstep.explain(scoped, "bf16,loop:leek=state")(PARAMS, DATA)


def test_a_rule_for_loops_names_no_operation():
    with pytest.raises(ValueError, match=r"a rule for loops has no op=; got op='add'"):
        halfstep.PrecisionRule("state", op="add")
    with pytest.raises(ValueError, match=r"got op='scan' with loop='step'"):
        halfstep.PrecisionRule("float32", op="scan", loop="step")
