"""Methods that differentiate a loss more than once, or a solution: as exact as cast by hand."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import halfstep
from tests.fuzz._compose_names import ByHand, Plain
from tests.fuzz._compose_oracle import Judge

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("standard_promotion")]
every_format = pytest.mark.parametrize("policy", ["bf16", "f16"])
WIDTH, BATCH = 16, 32
SCALES = {"bf16": 1.0, "f16": 256.0}


class Cast(NamedTuple):
    """How a method is computed.

    Attributes:
        mm: The matrix product.
        cast: What is done with a function: `autocast`, or nothing.
        scale: The loss scale.
    """

    mm: Callable[[Any, Any], Any]
    cast: Callable[[Callable[..., Any]], Callable[..., Any]]
    scale: float

    def grad(self, loss: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """The gradient of a loss under its scale."""
        scaled = jax.grad(lambda *values: loss(*values) * self.scale, **options)
        return lambda *values: jax.tree.map(lambda leaf: leaf / self.scale, scaled(*values))


def values() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    matrix = functools.partial(normal, WIDTH, WIDTH, scale=WIDTH**-0.5)
    p = {"w": matrix(), "b": normal(WIDTH, scale=0.1), "o": matrix()}
    return p, normal(BATCH, WIDTH), normal(BATCH, WIDTH)


def net(c: Cast, p: Any, x: Any) -> Any:
    return c.mm(jnp.tanh(c.mm(x, p["w"]) + p["b"]), p["o"])


def loss_of(c: Cast) -> Callable[..., Any]:
    return lambda p, x, y: jnp.mean((net(c, p, x) - y) ** 2)


def norm_of(tree: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def direction(p: Any) -> Any:
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), p)


# Each returns results and derivatives.


def sharpness_aware(c: Cast, p: Any, x: Any, y: Any) -> Any:
    """SAM: the gradient at the worst place nearby."""
    gradient = c.grad(c.cast(loss_of(c)))
    first = gradient(p, x, y)
    size = norm_of(first)
    worst = jax.tree.map(lambda leaf, g: leaf + 0.05 * g / size, p, first)
    return first, gradient(worst, x, y)


def meta(c: Cast, p: Any, x: Any, y: Any) -> Any:
    """MAML: the gradient through steps of an inner descent, all of it cast."""

    def outer(p: Any, x: Any, y: Any) -> Any:
        inner = p
        for _ in range(3):
            # In float16 the gradient inside has no scale, and must not be small: no mean.
            gradient = jax.grad(lambda p: jnp.sum((net(c, p, x[::2]) - y[::2]) ** 2) / WIDTH)(inner)
            inner = jax.tree.map(lambda leaf, g: leaf - 0.02 * g, inner, gradient)
        return jnp.mean((net(c, inner, x[1::2]) - y[1::2]) ** 2)

    return (), c.grad(c.cast(outer))(p, x, y)


def meta_of_cast(c: Cast, p: Any, x: Any, y: Any) -> Any:
    """MAML around a loss that is cast."""
    loss = c.cast(loss_of(c))

    def outer(p: Any) -> Any:
        gradient = c.grad(loss)(p, x[::2], y[::2])
        inner = jax.tree.map(lambda leaf, g: leaf - 0.5 * g, p, gradient)
        return loss(inner, x[1::2], y[1::2])

    return (), c.grad(outer)(p)


def meta_in_a_loop(c: Cast, p: Any, x: Any, y: Any) -> Any:
    """MAML whose inner descent is a scan: its parameters are a carry."""

    def outer(p: Any, x: Any, y: Any) -> Any:
        def step(inner: Any, batch: Any) -> Any:
            def loss(p: Any) -> Any:
                return jnp.sum((net(c, p, batch[0]) - batch[1]) ** 2) / WIDTH

            return jax.tree.map(lambda leaf, g: leaf - 0.02 * g, inner, jax.grad(loss)(inner)), None

        batches = x.reshape(8, -1, WIDTH), y.reshape(8, -1, WIDTH)
        inner, _ = lax.scan(step, p, batches)
        return jnp.mean((net(c, inner, x) - y) ** 2)

    return (), c.grad(c.cast(outer))(p, x, y)


def gradient_penalty(c: Cast, p: Any, x: Any, y: Any) -> Any:
    """WGAN-GP: a critic whose gradient by its input is kept near one."""

    def critic(p: Any, x: Any) -> Any:
        return jnp.sum(net(c, p, x), axis=-1)

    def loss(p: Any, x: Any, y: Any) -> Any:
        between = 0.3 * x + 0.7 * y
        gradient = jax.vmap(jax.grad(lambda x: critic(p, x[None])[0]))(between)
        size = jnp.sqrt(jnp.sum(gradient**2, axis=-1) + 1e-6)
        penalty = jnp.mean((size - 1) ** 2)
        return jnp.mean(critic(p, x)) - jnp.mean(critic(p, y)) + 10 * penalty

    return (), c.grad(c.cast(loss))(p, x, y)


def reverse_over_reverse(c: Cast, p: Any, x: Any, y: Any) -> Any:
    gradient = c.grad(c.cast(loss_of(c)))
    towards = direction(p)

    def along(p: Any) -> Any:
        made = jax.tree.map(lambda a, b: jnp.sum(a * b), gradient(p, x, y), towards)
        return sum(jax.tree.leaves(made))

    return (), c.grad(along)(p)


def forward_over_reverse(c: Cast, p: Any, x: Any, y: Any) -> Any:
    gradient = c.grad(c.cast(loss_of(c)))
    return (), jax.jvp(lambda p: gradient(p, x, y), (p,), (direction(p),))


def reverse_over_forward(c: Cast, p: Any, x: Any, y: Any) -> Any:
    loss = c.cast(loss_of(c))
    return (), c.grad(lambda p: jax.jvp(lambda p: loss(p, x, y), (p,), (direction(p),))[1])(p)


def linear_solution(c: Cast, p: Any, x: Any, y: Any) -> Any:
    """Implicit differentiation of a linear system, by `custom_linear_solve`."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        def times(v: Any) -> Any:
            return 2 * v + 0.3 * c.mm(c.mm(v, p["w"]), p["w"].T)

        def solve(times: Any, b: Any) -> Any:
            # Richardson's iteration: the eigenvalues lie within 2 and 4 or so.
            return lax.fori_loop(0, 40, lambda _, v: v + 0.3 * (b - times(v)), jnp.zeros_like(b))

        made = lax.custom_linear_solve(times, c.mm(x, p["o"]), solve, symmetric=True)
        return jnp.mean((made - y) ** 2)

    return (), c.grad(c.cast(loss))(p, x, y)


def root(c: Cast, p: Any, x: Any, y: Any) -> Any:
    """Implicit differentiation of a fixed point, by `custom_root`."""

    def loss(p: Any, x: Any, y: Any) -> Any:
        def residual(z: Any) -> Any:
            return z - jnp.tanh(0.4 * c.mm(z, p["w"]) + x)

        def solve(f: Any, z: Any) -> Any:
            return lax.fori_loop(0, 40, lambda _, z: z - f(z), z)

        def tangent(g: Any, y: Any) -> Any:
            return lax.fori_loop(0, 40, lambda _, v: v + (y - g(v)), jnp.zeros_like(y))

        z = lax.custom_root(residual, jnp.zeros_like(x), solve, tangent)
        return jnp.mean((c.mm(z, p["o"]) - y) ** 2)

    return (), c.grad(c.cast(loss))(p, x, y)


METHODS: dict[str, Callable[..., Any]] = {
    made.__name__: made
    for made in (
        sharpness_aware,
        meta,
        meta_of_cast,
        meta_in_a_loop,
        gradient_penalty,
        reverse_over_reverse,
        forward_over_reverse,
        reverse_over_forward,
        linear_solution,
        root,
    )
}


def as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


@functools.cache
def exactly(method: Callable[..., Any]) -> Any:
    """What the oracle makes of a method, in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), values())
        exact = jax.jit(functools.partial(method, Cast(Plain().mm, as_is, 1.0)))(*wide)
        return jax.tree.map(np.asarray, exact)


@functools.cache
def judge_of(method: Callable[..., Any], policy: str) -> Judge:
    """The oracle in float64, and casts by hand in float32."""
    half = halfstep.FORMATS[policy].dtype
    made = Cast(ByHand(half).mm, as_is, SCALES[policy])
    return Judge(exactly(method), jax.jit(functools.partial(method, made))(*values()), half)


def by_halfstep(method: Callable[..., Any], policy: str, given: Any, rule: str = "") -> Any:
    cast = functools.partial(halfstep.autocast, policy=f"{policy}{rule}")
    made = Cast(Plain().mm, lambda function: cast(function), SCALES[policy])
    return jax.jit(functools.partial(method, made))(*given)


@pytest.mark.rows(2)
@every_format
@pytest.mark.parametrize("name", METHODS)
def test_as_exact_as_by_hand(name: str, policy: str) -> None:
    judge = judge_of(METHODS[name], policy)
    assert not judge.is_ill
    assert judge.disagreements(by_halfstep(METHODS[name], policy, values())) == []


@pytest.mark.rows(1)
@every_format
def test_without_islands(policy: str) -> None:
    judge = judge_of(gradient_penalty, policy)
    got = by_halfstep(gradient_penalty, policy, values(), ",store:op:*=keep")
    assert judge.disagreements(got) == []


@every_format
def test_a_wrong_method_is_found(policy: str) -> None:
    judge = judge_of(sharpness_aware, policy)
    first, second = by_halfstep(sharpness_aware, policy, values())
    # As if the second gradient were that of the first place.
    assert judge.disagreements((first, first)) != []
    assert judge.disagreements((first, second)) == []


@pytest.mark.rows(2)
@every_format
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_with_64_bits_turned_on(dtype: Any, policy: str) -> None:
    judge = judge_of(sharpness_aware, policy)
    with jax.enable_x64(True):
        given = jax.tree.map(lambda leaf: leaf.astype(dtype), values())
        got = by_halfstep(sharpness_aware, policy, given)
        assert {leaf.dtype for leaf in jax.tree.leaves(got)} == {np.dtype(dtype)}
    assert judge.disagreements(got) == []
