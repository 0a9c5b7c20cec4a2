"""The dtype in which gradients of parameters are made, and so summed over devices."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import autocast
from tests._jaxprs import contractions, equations
from tests._rows import slow_unless
from tests.autocast._shared import W, X, compute, every_format

pytestmark = [pytest.mark.core, pytest.mark.types]


def loss(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w) ** 2)


def results(func: Callable[..., Any], *args: Any) -> list[str]:
    return [
        str(equation.outvars[0].aval.dtype)
        for equation in equations(jax.make_jaxpr(func)(*args))
        if equation.primitive.name == "dot_general"
    ]


def test_by_default():
    assert results(jax.grad(autocast(loss, "f16")), W, X) == ["float16", "float32"]
    assert results(jax.grad(autocast(loss, "bf16")), W, X) == ["bfloat16"] * 2


@every_format
def test_as_asked(policy: str):
    low = str(compute(policy))
    wide = jax.grad(autocast(loss, policy, reduce_dtype="f32"))
    assert results(wide, W, X) == [low, "float32"]
    assert set(contractions(wide, W, X)) == {low}
    assert results(jax.grad(autocast(loss, policy, reduce_dtype=policy)), W, X) == [low] * 2


def test_beyond_the_range():
    """Four examples of 20000 each: no 16-bit sum holds the gradient, and float32 does."""
    func = autocast(lambda w, x: jnp.sum(x @ w), "f16")
    x = jnp.full((4, 1), 20000.0)
    assert jax.grad(func)(jnp.ones((1, 1)), x) == 80000


TRANSFORMS = {
    "vmap over examples": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, x[:, None]),
    "vmap over weights": lambda f: lambda w, x: jax.vmap(f, (0, None))(jnp.stack([w, 2 * w]), x),
    "vmap over both": lambda f: (
        lambda w, x: jax.vmap(f, (2, 1))(jnp.stack([w, 2 * w], 2), jnp.stack([x, x], 1))
    ),
    "scan": lambda f: lambda w, x: jax.lax.scan(lambda c, r: (c, f(w, r[None])), 0, x)[1],
    "remat": jax.checkpoint,
    "jit": jax.jit,
}


@pytest.mark.rows(10)
@every_format
@pytest.mark.parametrize("accumulate", ["", ",accumulate=f32"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_transformations(name: str, accumulate: str, policy: str):
    made = autocast(loss, policy + accumulate, reduce_dtype="f32")
    ours = TRANSFORMS[name](jax.grad(made, argnums=(0, 1)))(W / 3, X)
    exact = TRANSFORMS[name](jax.grad(loss, argnums=(0, 1)))(W / 3, X)
    for got, right in zip(ours, exact, strict=True):
        # Two roundings of the operands, one of the product, one of what comes back; twice.
        error = np.linalg.norm(got - right) / np.linalg.norm(right)
        assert error <= 8 * halfstep.FORMATS[policy].eps / 2


@every_format
def test_second_derivatives(policy: str):
    """Forward over reverse, and reverse over reverse."""
    ours, exact = autocast(loss, policy, reduce_dtype="f32"), loss
    forward = [jax.jvp(jax.grad(f), (W / 3, X), (W, X))[1] for f in (ours, exact)]
    reverse = [
        jax.grad(lambda w, f=f: jnp.sum(jax.grad(f)(w, X) ** 2))(W / 3) for f in (ours, exact)
    ]
    for got, right in (forward, reverse):
        # Twice as many roundings as a gradient has.
        error = np.linalg.norm(got - right) / np.linalg.norm(right)
        assert error <= 16 * halfstep.FORMATS[policy].eps / 2


@pytest.mark.rows(1)
@every_format
def test_a_convolution(policy: str):
    def func(kernel: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME") ** 2)

    kernel = jax.random.normal(jax.random.key(0), (5, 3, 3, 3))
    x = jax.random.normal(jax.random.key(1), (2, 3, 8, 8))
    for transform in (lambda f: f, lambda f: lambda k, x: jax.vmap(f, (None, 0))(k, x[:, None])):
        gradient = jax.grad(autocast(func, policy, reduce_dtype="f32"))
        got = transform(gradient)(kernel, x)
        right = transform(jax.grad(func))(kernel, x)
        error = np.linalg.norm(got - right) / np.linalg.norm(right)
        assert error <= 8 * halfstep.FORMATS[policy].eps / 2


@every_format
@pytest.mark.parametrize(
    "name",
    slow_unless(
        ["vmap over examples", "vmap over weights", "vmap over both"],
        lambda name: name == "vmap over weights",
    ),
)
def test_forward_mode(name: str, policy: str):
    """The derivative in all directions at once, and its own derivative in the same way."""
    made = autocast(loss, policy, reduce_dtype="f32")
    for derivative in (jax.jacfwd, lambda f: jax.jacfwd(jax.jacfwd(f))):
        ours, exact = (TRANSFORMS[name](derivative(f))(W / 3, X) for f in (made, loss))
        # Twice as many roundings as a gradient has.
        error = np.linalg.norm(ours - exact) / np.linalg.norm(exact)
        assert error <= 16 * halfstep.FORMATS[policy].eps / 2


@pytest.mark.parametrize("wrap", [lambda step: step, jax.checkpoint])
def test_what_all_iterations_read_has_a_gradient_that_is_summed_in_float32(
    wrap: Callable[..., Any],
):
    keys = jax.random.uniform(jax.random.key(0), (2048, 8, 8), minval=0.5, maxval=1.5)

    def loss(w: jax.Array) -> jax.Array:
        query = jnp.ones((4, 8)) @ w

        def step(total: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
            return total + jnp.sum(query @ key), None

        return jax.lax.scan(wrap(step), jnp.zeros(()), keys)[0]

    want = jax.grad(loss)(jnp.eye(8))
    # In 16 bits, a sum of 2,048 terms stalls at an eighth.
    np.testing.assert_allclose(jax.grad(autocast(loss, "bf16"))(jnp.eye(8)), want, rtol=0.01)


@pytest.mark.parametrize(("length", "dtype"), [(127, "bfloat16"), (128, "float32")])
def test_what_few_iterations_read_stays_in_16_bits(length: int, dtype: str):
    def loss(w: jax.Array) -> jax.Array:
        query = jnp.ones((4, 8)) @ w
        step = lambda h, _: (jnp.tanh(h @ query.T @ query), None)  # noqa: E731
        return jax.lax.scan(step, query, length=length)[0]

    traced = jax.make_jaxpr(autocast(loss, "bf16"))(jnp.eye(8))
    loop = next(one for one in equations(traced) if one.primitive.name == "scan")
    # Constants come first.
    assert loop.invars[0].aval.dtype.name == dtype
