"""What is rounded, and how often; `tests/conformance/test_numerics.py` has the known traps."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import DynamicLossScaling

pytestmark = pytest.mark.usefixtures("standard_promotion")


def gradient(func: Any, policy: str) -> Any:
    """Through the library's own transformation, which adds scaling and a verdict."""
    return halfstep.filter_grad(func, DynamicLossScaling(1.0), policy=policy)


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
