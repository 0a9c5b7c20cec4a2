"""A rounded number is one number: for every reader, compiled as users compile or not at all.

The other tests run with `xla_allow_excess_precision=false`, which users do not: here it is on.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Literal

import halfstep
from halfstep._base import rounding as _settle
from tests._rows import slow_unless
from tests.autocast._shared import stored_as
from tests.conformance.test_structures import ROWS, Row, data

pytestmark = pytest.mark.core
EXCESS = {"xla_allow_excess_precision": True}
EPSILON = float(np.finfo(np.float32).eps)
POLICIES = ("bf16", "f16", "f8", "bf16,residuals=e4m3")


def as_users_compile(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is compiled with the default of `xla_allow_excess_precision`."""
    return jax.jit(func, compiler_options=EXCESS)


def logits(w, x):
    return jax.nn.gelu(x @ w["a"] + w["bias"]) @ w["b"] + w["bias"][:, :4]


def losses(w, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits(w, x), labels)


@pytest.fixture(scope="module")
def trained() -> tuple[dict[str, jax.Array], jax.Array, jax.Array]:
    """A classifier that is sure of its answers, whose losses are almost zero."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (256, 16))
    labels = jnp.argmax(x[:, :4], axis=1)
    w = {
        "a": jax.random.normal(keys[1], (16, 64)) / 4,
        "b": jax.random.normal(keys[2], (64, 4)) / 8,
        "bias": jnp.zeros((1, 64)),
    }
    optimizer = optax.adam(1e-2)

    @jax.jit
    def train(w):
        def step(carry, _):
            w, state = carry
            grads = jax.grad(lambda w: losses(w, x, labels).mean())(w)
            updates, state = optimizer.update(grads, state)
            return (optax.apply_updates(w, updates), state), None

        return jax.lax.scan(step, (w, optimizer.init(w)), None, length=300)[0][0]

    with jax.numpy_dtype_promotion("standard"):  # Optax's counters are integers.
        return train(w), x, labels


@pytest.mark.rows(1)
@pytest.mark.parametrize("policy", [*POLICIES, "bf16:inputs", "f16:inputs"])
def test_a_cross_entropy_is_never_negative(trained: Any, policy: str):
    if policy.endswith(":inputs"):
        func = halfstep.cast_function(losses, policy.removesuffix(":inputs"))
    else:
        func = halfstep.autocast(losses, policy)
    for one in (func, as_users_compile(func)):
        assert jnp.min(one(*trained)) >= 0


def test_without_it_losses_are_negative(trained: Any, monkeypatch: pytest.MonkeyPatch):
    """The test above is one that can fail."""
    monkeypatch.setattr(_settle._settle, "bind", lambda value, **_: value)
    assert jnp.min(as_users_compile(halfstep.autocast(losses, "bf16"))(*trained)) < 0


def normed(w, x):
    h = x @ w + w[:1]
    h = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(h.var(-1, keepdims=True) + 1e-5) * w[1:2]
    return h + jax.nn.softmax(h @ h.T * 0.1) @ (x @ w - h * 0.3)


def compared(w, x):
    h = x @ w + w[:1]
    top = jnp.max(h, axis=-1, keepdims=True)
    return [
        *(h == top, jnp.argmax(h, -1), jnp.floor(h), jnp.sort(h), h.astype(jnp.int32), jnp.sign(h)),
        *(jnp.where(h >= top, h, 0.0), jnp.transpose(h)[::2], jnp.clip(h * w[1:2] - h, -1.0, 1.0)),
    ]


def convolved(w, x):
    kernel = w[:27].reshape(3, 3, 3, -1)
    images = x[:, :27].reshape(-1, 3, 3, 3)
    numbers = ("NHWC", "HWIO", "NHWC")
    made = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return jax.nn.relu(made + w[:1].reshape(1, 1, 1, -1)) * made


def tied(w, x):
    # One parameter, read by a lookup, by arithmetic and by a product.
    h = (x @ w)[:8]
    return (w[jnp.arange(8)] * h + h) @ w.T


FUNCTIONS = {func.__name__: func for func in (normed, compared, convolved, tied)} | {
    name: row.loss for name, row in ROWS.items()
}


def is_same(left: Any, right: Any) -> bool:
    """Whether results are the same number for number, but for XLA's own order of float32 sums.

    Where it fuses, it adds float32 numbers up in another order, also without autocast. A rounding
    that is left out moves single numbers 3,000 times as far, and a mean of 1,024 numbers 100 times.
    """
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(
        np.allclose(a, b, rtol=0, atol=10 * EPSILON * float(np.max(np.abs(a)))) for a, b in pairs
    )


def argument_of(name: str) -> tuple[jax.Array, jax.Array]:
    w, x = data()
    return (w, x) if isinstance(ROWS.get(name), Row) else (w[0], x)


CASES = [
    (name, policy, islands)
    for name in FUNCTIONS
    for policy, islands in [*((policy, True) for policy in POLICIES), ("bf16", False)]
]


@pytest.mark.rows(7)
@pytest.mark.parametrize(
    ("name", "policy", "islands"),
    # On every change all functions in one policy, and some in all.
    slow_unless(
        CASES,
        lambda name, policy, islands: (
            (policy == "bf16" and islands) or name in ("normed", "tied", "remat in scan")
        ),
    ),
)
def test_compiled_and_not_compiled_are_the_same(name: str, policy: str, islands: bool):
    func, given = halfstep.autocast(FUNCTIONS[name], stored_as(policy, islands)), argument_of(name)
    assert is_same(func(*given), as_users_compile(func)(*given))


@pytest.mark.parametrize("name", ["normed", "tied"])
def test_without_it_they_are_not(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_settle._settle, "bind", lambda value, **_: value)
    func = halfstep.autocast(FUNCTIONS[name], "bf16")
    given = argument_of(name)
    assert not is_same(func(*given), as_users_compile(func)(*given))


def test_a_recomputed_island_sees_what_the_forward_pass_saw():
    """The derivative of `exp` is `exp` again: computed twice, of one rounded number."""

    def exponentials(shift, w, x):
        made = jnp.exp(x @ w + w[:1] + shift)
        # A contraction follows, so that it is an island in the middle of a function.
        return made, made @ w

    w, x = argument_of("normed")
    func = halfstep.autocast(exponentials, "bf16", params=1)
    shift = jnp.zeros(x.shape)

    @as_users_compile
    def both(shift):
        (made, product), back = jax.vjp(lambda shift: func(shift, w, x), shift)
        return made, back((jnp.ones_like(made), jnp.zeros_like(product)))[0]

    made, slope = both(shift)
    assert np.array_equal(slope, made)


def squares(shift, x, w):
    """The derivative of a square is twice what was kept of the value."""
    seen = x @ w + shift
    return jnp.sum(jnp.square(seen) @ w), seen


EIGHT_BITS = jax.value_and_grad(halfstep.autocast(squares, "bf16,store:op:add=e4m3"), has_aux=True)


def test_8_bits_for_the_backward_pass_are_those_of_what_the_forward_pass_saw():
    shift, x = jax.random.normal(jax.random.key(0), (2, 64, 64))
    (_, seen), slopes = EIGHT_BITS(shift, x, jnp.eye(64))
    (_, same), compiled = as_users_compile(EIGHT_BITS)(shift, x, jnp.eye(64))
    assert np.array_equal(seen, same)
    assert np.array_equal(slopes, compiled)
    # It was kept in 8 bits: the significand has four, of which the first is not stored.
    assert np.array_equal(np.frexp(slopes)[0] * 16, np.round(np.frexp(slopes)[0] * 16))
    assert not np.array_equal(slopes, 2 * seen)


def test_8_bits_are_made_of_a_rounded_sum():
    """XLA:CPU rounds where a sum has several readers; other compilers read it as it was added."""
    jaxpr: Any = jax.make_jaxpr(EIGHT_BITS)(*[jnp.ones((64, 64))] * 3).jaxpr
    rounds = (_settle.NAME, "reduce_precision")
    makers = {var: e for e in jaxpr.eqns for var in e.outvars if e.primitive.name not in rounds}
    waiting = [v for v in makers if v.aval.dtype == jnp.float8_e4m3fn]
    assert waiting
    read = set()
    while waiting:
        var = waiting.pop()
        if (equation := makers.get(var)) is None:
            continue
        operands = equation.invars
        if equation.primitive.name == "optimization_barrier":
            # It hands on each of its operands, and does not make one of the others.
            operands = [operands[equation.outvars.index(var)]]
        elif id(equation) in read:
            continue
        read.add(id(equation))
        waiting += [var for var in operands if not isinstance(var, Literal)]
    (total,) = (
        equation
        for equation in jaxpr.eqns
        if equation.primitive.name == "add" and equation.outvars[0].aval.dtype == jnp.bfloat16
    )
    assert id(total) not in read


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_pattern_passes(dtype: Any):
    patterns = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), dtype)
    for rounding in _settle.Rounding:
        made = jax.jit(lambda x, rounding=rounding: _settle.settled(x, rounding))(patterns)
        wide = jax.jit(lambda x, rounding=rounding: _settle.widened(x, rounding))(patterns)
        for found in (made, wide.astype(dtype)):
            number = ~np.isnan(np.asarray(patterns, np.float32))
            assert np.array_equal(np.asarray(found)[number], np.asarray(patterns)[number])
            assert np.isnan(np.asarray(found, np.float32)[~number]).all()


def test_a_cast_rounds_as_numpy_does():
    words = jnp.arange(2**16, dtype=jnp.uint32) << 16
    for low in (0x0000, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        value = jax.lax.bitcast_convert_type(words | low, jnp.float32)
        made = as_users_compile(lambda x: _settle.cast(x, np.dtype(jnp.bfloat16)) + 0)(value)
        with np.errstate(invalid="ignore"):
            expected = np.asarray(value).astype(jnp.bfloat16)
        number = ~np.isnan(np.asarray(value))
        assert np.array_equal(np.asarray(made)[number], expected[number])


def test_derivatives_and_mapping():
    x = jnp.linspace(-1, 1, 8).astype(jnp.bfloat16)
    made, tangent = jax.jvp(_settle.settled, (x,), (2 * x,))
    assert jnp.array_equal(made, x)
    assert jnp.array_equal(tangent, 2 * x)
    assert jnp.array_equal(jax.vmap(_settle.settled)(x), x)
    (back,) = jax.linear_transpose(_settle.settled, x)(x)
    assert jnp.array_equal(back, x)
