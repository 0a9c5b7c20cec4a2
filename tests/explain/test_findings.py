"""Every kind of finding: a function that has it, and that has nothing else."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from tests.explain._functions import F32, FAULTS, WIDTH, Fault, W, X, shape

every_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.func.__name__)


def explained(func: Any, *args: Any, policy: Any = "bf16", **options: Any) -> Any:
    return halfstep.explain(func, policy, **options)(*args)


@every_fault
def test_a_fault_is_found(fault: Fault):
    report = explained(fault.func, *fault.args, policy=fault.policy)
    assert {finding.kind for finding in report.findings} == {fault.kind}
    for finding in report.findings:
        assert fault.what in finding.what
        assert fault.fix in finding.fix
        assert finding.source.file == "tests/explain/_functions.py"
        first = inspect.getsourcelines(fault.func)[1]
        assert first < finding.source.line < first + 20


@every_fault
def test_what_is_small_is_no_finding(fault: Fault):
    report = explained(fault.func, *fault.args, policy=fault.policy, min_bytes=2**30)
    # A number out of range is one however small the array is.
    assert [finding.kind for finding in report.findings] == ["range"] * (fault.kind == "range")


def masked_softmax(w: Any, x: Any, mask: Any) -> Any:
    return jnp.sum(jax.nn.softmax(jnp.where(mask, x @ w, -1e9)) @ w)


def squared_error(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean((x @ w - y) ** 2)


def absolute_error(w: Any, x: Any, y: Any) -> Any:
    return jnp.mean(jnp.abs(x @ w - y))


def bias_before_softmax(w: Any, x: Any, bias: Any) -> Any:
    return jnp.sum(jax.nn.softmax(x @ w + bias) @ w)


def normalized(w: Any, x: Any) -> Any:
    hidden = x @ w
    centered = hidden - jnp.mean(hidden, -1, keepdims=True)
    return jnp.sum(centered * jax.lax.rsqrt(jnp.mean(centered**2, -1, keepdims=True) + 1e-8) @ w)


def returned(w: Any, x: Any, noise: Any) -> Any:
    return x @ w + noise


CLEAN = [
    (masked_softmax, (W, X, shape(*X.shape, dtype=bool))),
    (squared_error, (W, X, X)),
    (absolute_error, (W, X, X)),
    (bias_before_softmax, (W, X, X)),
    (normalized, (W, X)),
    (returned, (W, X, X)),
]


@pytest.mark.parametrize("policy", ["bf16", "f16"])
@pytest.mark.parametrize(("func", "args"), CLEAN, ids=lambda v: getattr(v, "__name__", ""))
def test_float32_that_belongs_is_no_finding(func: Any, args: Any, policy: str):
    explained(func, *args, policy=policy).check(low=1.0, max_findings=0)


def test_one_finding_for_what_is_on_one_line():
    def twice(w: Any, x: Any) -> Any:
        for _ in range(2):
            x = jnp.dot(x, w, precision="highest")
        return jnp.sum(x)

    (finding,) = explained(twice, W, X).findings
    assert finding.count == 2
    assert finding.bytes == 2 * 4 * (2 * np.prod(X.shape) + np.prod(W.shape))


def test_a_rule_is_no_finding_but_is_said():
    policy = halfstep.Policy(compute="bf16", rules=("op:dot_general=float32",))
    report = explained(lambda w, x: jnp.sum(x @ w), W, X, policy=policy)
    assert report.findings == ()
    assert report.totals.low == 0
    assert any("op:dot_general=float32" in note for note in report.notes)
    (dot,) = [entry for entry in report.operations if entry.is_contraction]
    assert dot.by == "op:dot_general=float32"
    assert dot.dtypes == "f32 -> f32"


def test_kept_precision_is_no_finding():
    def func(w: Any, x: Any) -> Any:
        with halfstep.keep_precision():
            return jnp.sum(x @ w)

    report = explained(func, W, X)
    assert report.findings == ()
    (dot,) = [entry for entry in report.operations if entry.is_contraction]
    assert dot.reason == "keep_precision"


def test_a_loop_that_a_rule_keeps_is_looked_into():
    def func(w: Any, x: Any) -> Any:
        with jax.named_scope("loop"):
            return jnp.sum(jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0])

    policy = halfstep.Policy(compute="bf16", rules=("scope:loop=float32",))
    report = explained(func, W, X, policy=policy)
    assert report.totals.low == 0
    assert report.totals.contraction_flops == {"f32": 3 * 2 * X.shape[0] * WIDTH * WIDTH}


def test_both_operands_of_16_bits_are_no_finding():
    half = shape(WIDTH, WIDTH, dtype=jnp.bfloat16)
    report = explained(lambda w, x: jnp.sum((x @ w).astype(F32)), half, half)
    report.check(low=1.0)


def test_float64_is_found():
    with jax.enable_x64(True):
        w = shape(WIDTH, WIDTH, dtype=jnp.float64)
        (finding,) = explained(lambda w, x: jnp.sum(x @ w), w, w).findings
    assert finding.kind == "contraction not lowered"
    assert "written in f64" in finding.what


def test_the_rule_that_a_range_finding_suggests_repairs_it():
    def func(w: Any, x: Any) -> Any:
        with jax.named_scope("head"):
            return jnp.max((x @ w) * 512.0)

    (finding,) = explained(func, W, X, policy="f16").findings
    rule = finding.fix.split('rules=("')[1].split('"')[0]
    policy = halfstep.Policy(compute="f16", rules=(rule,))
    assert explained(func, W, X, policy=policy).findings == ()
    w, x = jnp.eye(4), jnp.full((4, 4), 160.0)
    assert halfstep.autocast(func, policy)(w, x) == 81920
    assert halfstep.autocast(func, "f16")(w, x) == jnp.inf
