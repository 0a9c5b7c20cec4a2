"""With values=True the function runs once, and contractions beyond float16's range are found."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from tests.explain._functions import shape

W, X = 160 * jnp.eye(8), jnp.full((8, 8), 512.0)
"""Whose product is 81,920."""


def plain(w: Any, x: Any) -> Any:
    return jnp.sum(x @ w)


def in_a_scan(w: Any, x: Any) -> Any:
    def body(carry: Any, x: Any) -> Any:
        return carry + jnp.sum(x @ w), None

    return jax.lax.scan(body, 0.0, jnp.stack([0 * x, x]))[0]


def in_remat(w: Any, x: Any) -> Any:
    return jnp.sum(jax.checkpoint(lambda x: x @ w)(x))


def in_custom_jvp(w: Any, x: Any) -> Any:
    @jax.custom_jvp
    def product(w: Any, x: Any) -> Any:
        return x @ w

    product.defjvp(lambda primals, tangents: (product(*primals), product(*tangents)))
    return jnp.sum(product(w, x))


def in_a_branch(w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x + w) @ (w + w)))


def in_a_jit(w: Any, x: Any) -> Any:
    return jnp.sum(jax.jit(lambda w, x: x @ w)(w, x))


CASES = [plain, in_a_scan, in_remat, in_custom_jvp, in_a_branch, in_a_jit]


@pytest.mark.parametrize("func", CASES, ids=lambda f: f.__name__)
def test_a_product_beyond_the_range_is_found(func: Any):
    report = halfstep.explain(func, "f16", values=True)(W, X)
    (finding,) = report.findings
    assert finding.kind == "range"
    assert "8.19e+04" in finding.what
    assert "op:dot_general=accumulate" in finding.fix
    assert max(e.largest for e in report.operations if e.largest is not None) == 81920


@pytest.mark.parametrize("func", CASES, ids=lambda f: f.__name__)
def test_within_the_range_there_is_no_finding(func: Any):
    assert halfstep.explain(func, "f16", values=True)(W / 8, X).findings == ()


def test_bfloat16_has_the_range():
    assert halfstep.explain(plain, "bf16", values=True)(W, X).findings == ()


def test_nothing_is_run_unasked():
    report = halfstep.explain(plain, "f16")(W, X)
    assert report.findings == ()
    assert {entry.largest for entry in report.operations} == {None}


def test_what_is_not_finite_is_found():
    (finding,) = halfstep.explain(plain, "f16", values=True)(W, X * jnp.nan).findings
    assert finding.kind == "range"


def test_a_loop_of_unknown_length_is_not_looked_into_and_it_is_said():
    def func(w: Any, x: Any) -> Any:
        return jax.lax.while_loop(lambda x: x[0, 0] < 600, lambda x: x @ w, x)

    report = halfstep.explain(func, "f16", values=True)(W, X)
    assert report.findings == ()
    assert any("inside while were not looked into" in note for note in report.notes)


def test_shapes_have_no_values():
    with pytest.raises(TypeError, match="values=True runs the function once and needs arrays"):
        halfstep.explain(plain, "f16", values=True)(W, shape(8, 8))
