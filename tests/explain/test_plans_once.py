"""`explain` traces a function and decides about its operations once, and uses that for all."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from halfstep._autocast import tracing
from halfstep._explain import explained

pytestmark = pytest.mark.core


def _loss(params: Any, x: Any) -> Any:
    return jnp.mean(jax.nn.softmax(jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)


_PARAMS = {"up": jnp.ones((32, 64)), "down": jnp.ones((64, 32))}
_X = jnp.ones((16, 32))


@pytest.mark.parametrize("name", ["bf16", "f16", "f8", "f8-delayed"])
def test_every_operation_is_decided_once(name: str):
    decided = []

    def asked(operation: halfstep.Operation) -> bool:
        decided.append(operation)
        return operation.primitive == "exp"

    rule = halfstep.PrecisionRule("float32", where=asked)
    policy = halfstep.Policy.parse(name).replace(rules=(rule,))
    report = halfstep.explain(_loss, policy)(_PARAMS, _X)
    assert len(decided) == len(report.operations)


@pytest.mark.parametrize("name", ["bf16", "f8-delayed"])
def test_the_function_is_traced_once(name: str):
    calls = []

    def loss(params: Any, x: Any) -> Any:
        calls.append(x)
        return _loss(params, x)

    halfstep.explain(loss, name)(_PARAMS, _X)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["bf16", "f8-delayed"])
def test_the_plan_runs_once(name: str, monkeypatch: pytest.MonkeyPatch):
    planned, runs = [], []
    made, run = tracing.plan, explained.run_traced
    monkeypatch.setattr(tracing, "plan", lambda *args: planned.append(args) or made(*args))
    monkeypatch.setattr(
        explained, "run_traced", lambda *args, **more: runs.append(args) or run(*args, **more)
    )
    halfstep.explain(_loss, name)(_PARAMS, _X)
    assert len(planned) == len(runs) == 1


def test_the_planned_function_is_the_one_that_autocast_runs():
    """Figures that come from the plan are those of the function as `autocast` rewrites it."""
    report = halfstep.explain(_loss, "bf16")(_PARAMS, _X)
    jaxpr = jax.make_jaxpr(halfstep.autocast(_loss, "bf16"))(_PARAMS, _X).jaxpr
    casts = _casts(jaxpr)
    written = _casts(jax.make_jaxpr(_loss)(_PARAMS, _X).jaxpr)
    assert report.totals.casts == casts - written > 0


def _casts(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type":
            total += equation.invars[0].aval.dtype != equation.outvars[0].aval.dtype
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            total += _casts(inner) if hasattr(inner, "eqns") else 0
    return total
