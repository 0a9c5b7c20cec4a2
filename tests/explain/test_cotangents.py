"""Backward rules that are not linear are found where a loss scale would change them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import halfstep
from tests.conformance.test_structures import ROWS, data

W, X = jnp.ones((16, 16)), jnp.ones((4, 16))


def ruled(rule: Callable) -> Callable:
    """The identity, with a backward rule of its own."""

    @jax.custom_vjp
    def func(x: Any) -> Any:
        return x

    func.defvjp(lambda x: (x, x), lambda x, ct: (rule(x, ct),))
    return func


def found(func: Callable, policy: str = "f16", *args: Any) -> list[Any]:
    report = halfstep.explain(func, policy)(*(args or (W, X)))
    return [finding for finding in report.findings if finding.kind == "loss scale"]


RULES = {
    "clamp": lambda x, ct: jax.lax.clamp(-1.0, ct, 1.0),
    "sign": lambda x, ct: jnp.sign(ct),
    "gt": lambda x, ct: jnp.where(ct > 0, ct, 0.0),
    "square": lambda x, ct: ct / jnp.sqrt(jnp.sum(jnp.square(ct))),
    "mul": lambda x, ct: ct * ct,
    "div": lambda x, ct: x / ct,
    "dot_general": lambda x, ct: ct @ ct.T @ ct,
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_is_not_linear_is_found(name: str):
    func = ruled(RULES[name])
    (finding, *_) = found(lambda w, x: jnp.sum(func(x @ w) * 0.5))
    assert finding.what.startswith(f"`{name}` of a cotangent is not linear")
    assert finding.source.short.startswith("test_cotangents.py:")
    assert "clip gradients after they are unscaled" in finding.fix


def test_in_bfloat16_nothing_is_scaled():
    func = ruled(RULES["clamp"])
    assert found(lambda w, x: jnp.sum(func(x @ w)), "bf16") == []


def in_scan(func: Callable, w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.scan(lambda h, _: (func(h @ w), None), x, None, length=3)[0])


def in_cond(func: Callable, w: Any, x: Any) -> Any:
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda: func(x @ w), lambda: x))


@pytest.mark.rows(2)
@pytest.mark.parametrize("outer", [in_scan, in_cond, jax.checkpoint(in_scan, static_argnums=0)])
def test_it_is_found_inside(outer: Callable):
    assert found(lambda w, x: outer(ruled(RULES["clamp"]), w, x))
    assert not found(lambda w, x: outer(ruled(lambda x, ct: ct * x), w, x))


@pytest.mark.parametrize(
    "rule",
    [
        lambda x, ct: jnp.where(x > 0, ct, 0.0),
        lambda x, ct: ct / jnp.linalg.norm(x),
        lambda x, ct: jnp.cumsum(ct, axis=0)[::-1] @ (x.T @ x),
        lambda x, ct: jnp.concatenate([ct[:1] - ct[1:2], ct[1:]]),
    ],
)
def test_a_linear_rule_is_none(rule: Callable):
    func = ruled(rule)
    assert found(lambda w, x: jnp.sum(func(x @ w) * 0.5)) == []


@pytest.mark.rows(6)
@pytest.mark.parametrize("name", ROWS)
def test_no_structure_of_jax_is_one(name: str):
    assert found(ROWS[name].loss, "f16", *data()) == []


def test_no_derivative_of_jax_is_one():
    def loss(w: Any, x: Any) -> Any:
        h = jax.nn.relu(x @ w) + jax.nn.gelu(x @ w) + jnp.clip(x @ w, -1.0, 1.0)
        h = jnp.maximum(h, jnp.abs(x)) / jnp.linalg.norm(h) + jnp.sort(h, axis=-1)
        labels = jnp.arange(4)
        return optax.softmax_cross_entropy_with_integer_labels(h, labels).mean() + jnp.max(h)

    assert found(loss) == []


def test_a_function_without_a_backward_pass_has_none():
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.while_loop(lambda h: h[0, 0] < 9, lambda h: h @ w + 1, x))

    assert found(loss) == []
