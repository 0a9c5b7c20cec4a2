"""What is rounded, and how often; `tests/conformance/test_numerics.py` has the known traps."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep
from halfstep import DynamicLossScaling
from tests.autocast._shared import every_format, rounded, stored_as, with_and_without_islands

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]


def gradient(func: Any, policy: str) -> Any:
    """Through the library's own transformation, which adds scaling and a verdict."""
    return halfstep.filter_grad(func, DynamicLossScaling(1.0), policy=policy)


@pytest.mark.rows(1)
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


@pytest.mark.parametrize("policy", ["bf16", "f16"])
def test_numbers_of_the_program_are_not_rounded(policy: str):
    def decay(x: Any, weight: Any) -> Any:
        def step(h: Any, _: None) -> tuple[Any, Any]:
            # The product makes the carry an activation.
            h = 0.9 * h + 0.0 * jnp.tanh(h @ weight)
            return h, h

        return jax.lax.scan(step, x @ weight, None, length=40)[1][-1] @ weight

    eye = jnp.eye(8)
    func = halfstep.autocast(decay, policy)
    slope = jax.grad(lambda x: func(x, eye).sum())
    for got in (func(eye, eye)[0, 0], slope(eye)[0, 0]):
        # Each iteration rounds its result. 0.9 is 0.8984 in bfloat16: its 40th power is 7 % off.
        assert abs(got / 0.9**40 - 1) <= np.sqrt(40) * halfstep.FORMATS[policy].eps / 2, got


LABELS = jnp.arange(16)
SENSITIVE = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": functools.partial(jax.nn.logsumexp, axis=-1),
    "cross-entropy": lambda x: optax.softmax_cross_entropy_with_integer_labels(x, LABELS),
    "picked log_softmax": lambda x: jax.nn.log_softmax(x)[LABELS, LABELS],
    "softmax with broadcasting": lambda x: jnp.exp(x - jnp.max(x, axis=1)[:, None]),
    "layer norm": lambda x: jax.nn.standardize(x, axis=-1),
    "mean of squares": lambda x: jnp.mean(x**2, axis=-1),
    "sum": functools.partial(jnp.sum, axis=-1),
}


@pytest.mark.rows(5)
@pytest.mark.parametrize("islands", [True, False])
@pytest.mark.parametrize("policy", ["bf16", "f16"])
@pytest.mark.parametrize("name", SENSITIVE)
def test_exact_to_float32_of_what_a_product_makes(name: str, policy: str, islands: bool):
    """Of rounded products, sensitive functions are float32's own: no rounding is in between."""
    func, dtype = SENSITIVE[name], halfstep.FORMATS[policy].dtype
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(3 * rng.standard_normal((16, 16)), jnp.float32) for _ in range(2))
    product = (x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32)
    got = halfstep.autocast(lambda w, x: func(x @ w), stored_as(policy, islands))(w, x)
    # The same float32 operations, which the compiler may fuse otherwise: a few last places.
    single = halfstep.FORMATS["f32"].eps
    np.testing.assert_allclose(got, func(product), rtol=16 * single, atol=16 * single)


NUMBERS = jnp.linspace(1, 2, 64).reshape(8, 8)
QUOTIENTS = {
    "by a number": (lambda h: h / 3.0, True),
    "by an array": (lambda h: h / NUMBERS, False),
    "of a number": (lambda h: 3.0 / h, False),
    "no quotient": (lambda h: h**2.5, False),
}


@with_and_without_islands
@every_format
@pytest.mark.parametrize("name", QUOTIENTS)
def test_a_product_over_a_number_stays_in_the_compute_dtype(name: str, policy: str, islands: bool):
    func, is_low = QUOTIENTS[name]
    got = halfstep.autocast(lambda w, x: func(x @ w), stored_as(policy, islands))(
        jnp.eye(8), NUMBERS
    )
    exact = func(rounded(NUMBERS, policy))
    # A reciprocal that is rounded, and a product that is; else a few last places of float32.
    eps = halfstep.FORMATS[policy if is_low else "f32"].eps
    np.testing.assert_allclose(got, exact, rtol=eps if is_low else 4 * eps)
    assert got.dtype == jnp.float32
    assert bool((rounded(got, policy) == got).all()) == is_low
