"""Where casting the arguments is not enough: the rows of the conformance suite, autocast."""

import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import DynamicLossScaling
from tests.conformance.test_numerics import BATCH, IDS, ROWS, positions, regression

pytestmark = pytest.mark.usefixtures("standard_promotion")
# Beyond float16's range on the way: in bfloat16 all is well, in float16 it takes a rule.
RULED = MappingProxyType({("a dot whose output is 81920", "f16"): "op:dot_general=accumulate"})


@pytest.mark.parametrize("policy", ["bf16", "f16"])
@pytest.mark.parametrize("name", ROWS)
def test_unmodified(name: str, policy: str):
    func, make = ROWS[name]
    exact = np.asarray(func(make()), np.float32)

    def right(rules: Sequence[str]) -> bool:
        made = halfstep.autocast(func, halfstep.Policy(compute=policy, rules=rules))
        got = np.asarray(made(make()), np.float32)
        # One rounding of what is looked up or multiplied.
        close = np.abs(got - exact) <= halfstep.FORMATS[policy].eps * np.abs(exact)
        return bool(np.all(np.isfinite(got)) and np.all(close))

    rule = RULED.get((name, policy))
    assert right([]) is (rule is None)
    assert right([rule] if rule else [])


def gradient(func: Any, policy: str) -> Any:
    """Through the library's own transformation, which adds scaling and a verdict."""
    low = halfstep.autocast(func, policy)
    return halfstep.filter_grad(low, DynamicLossScaling(1.0), policy="f32")


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_a_float_target_of_100000(policy: str):
    _, finite, _ = gradient(regression, policy)(jnp.asarray(1.0), BATCH)
    assert finite


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_positions_beyond_2048(policy: str):
    assert gradient(positions, policy)(jnp.ones(1), IDS)[2][0] == 1


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_a_weight_shared_by_4096_steps(policy: str):
    def loss(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda c, x: (c + (w * x), None), 0.0, x)[0]

    assert gradient(loss, policy)(jnp.asarray(1.0), jnp.ones(4096))[2] == 4096


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_gradients_of_a_bias_add_up_in_float32(policy: str):
    def loss(bias: Any, x: Any) -> Any:
        return jnp.sum((x @ jnp.ones((1, 1))) + bias)

    # 4096 and one more: neither format can count that far.
    grads = gradient(loss, policy)(jnp.zeros(1), jnp.ones((4097, 1)))[2]
    assert grads[0] == 4097


def test_full_precision_is_the_function_itself():
    func = functools.partial(jnp.dot, jnp.full((3, 3), 0.1))
    x = jnp.full((3,), 0.1)
    assert (halfstep.autocast(func, "f32")(x) == func(x)).all()


def test_a_dot_is_rounded_once():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
    got = halfstep.autocast(lambda a: a @ b, "bf16")(jnp.asarray(a))
    low = [x.astype(jnp.bfloat16).astype(np.float64) for x in (a, b)]
    exact = low[0] @ low[1]
    # Accumulated in float32, then rounded to bfloat16: half a unit in the last place, and what
    # sixteen float32 additions can add.
    eps, single = halfstep.FORMATS["bf16"].eps, halfstep.FORMATS["f32"].eps
    bound = eps / 2 * np.abs(exact) + 16 * single * (np.abs(low[0]) @ np.abs(low[1]))
    assert (np.abs(np.asarray(got, np.float64) - exact) <= bound).all()
