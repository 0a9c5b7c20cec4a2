"""Autocast of every transformation inside every other: values, gradients and dtypes."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend import core
from jax.sharding import PartitionSpec

import halfstep
from halfstep._autocast.transform import autocast
from halfstep._base.jaxprs import ClosedJaxpr

pytestmark = pytest.mark.core

SIZE = 4
TURNS = 3
Block = Callable[[Any, Any], Any]


class Params(NamedTuple):
    w: Any
    b: Any


def block(params: Params, x: Any) -> Any:
    """A dense layer: a dot, a bias, a tanh."""
    return jnp.tanh(x @ params.w + params.b[None])


# Each takes a function of (params, x) that keeps the shape of x, and makes another such function.


def plain(func: Block, mesh: Any) -> Block:
    return func


def jit(func: Block, mesh: Any) -> Block:
    return jax.jit(func)


def vmap(func: Block, mesh: Any) -> Block:
    def run(params: Any, x: Any) -> Any:
        both = jax.vmap(func, (None, 0))(params, jnp.stack([x, 1 - x]))
        return both[0] - both[1]

    return run


def grad(func: Block, mesh: Any) -> Block:
    def energy(x: Any, params: Any) -> Any:
        return jnp.sum(func(params, x) ** 2) / 2

    return lambda params, x: jax.grad(energy)(x, params)


def jvp(func: Block, mesh: Any) -> Block:
    def run(params: Any, x: Any) -> Any:
        out, tangent = jax.jvp(functools.partial(func, params), (x,), (1 - x,))
        return (out + tangent) / 2

    return run


def scan(func: Block, mesh: Any) -> Block:
    def run(params: Any, x: Any) -> Any:
        def turn(carry: Any, scale: Any) -> Any:
            carry = func(params, scale * carry)
            return carry, jnp.mean(carry)

        last, means = jax.lax.scan(turn, x, jnp.linspace(0.8, 1.0, TURNS))
        return last + jnp.sum(means)

    return run


def while_(func: Block, mesh: Any) -> Block:
    def run(params: Any, x: Any) -> Any:
        def turn(carry: Any) -> Any:
            count, total, h = carry
            h = func(params, h)
            return count + 1, total + jnp.mean(h), h

        start = jnp.zeros((), jnp.int32), 0 * x[0, 0], x
        _, total, h = jax.lax.while_loop(lambda carry: carry[0] < TURNS, turn, start)
        return h + total

    return run


def cond(func: Block, mesh: Any) -> Block:
    def run(params: Any, x: Any) -> Any:
        # One branch comes out of a contraction, the other is float32 zeros.
        positive = jax.lax.cond(x[0, 0] < 100, func, lambda params, x: jnp.zeros_like(x), params, x)
        negative = jax.lax.cond(x[0, 0] > 100, func, lambda params, x: jnp.zeros_like(x), params, x)
        return positive + negative

    return run


def remat(func: Block, mesh: Any) -> Block:
    return jax.checkpoint(func)


def custom_jvp(func: Block, mesh: Any) -> Block:
    @jax.custom_jvp
    def run(params: Any, x: Any) -> Any:
        return func(params, x)

    @run.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        out, tangent = jax.jvp(func, primals, tangents)
        return out, 2 * tangent

    return run


def custom_vjp(func: Block, mesh: Any) -> Block:
    @jax.custom_vjp
    def run(params: Any, x: Any) -> Any:
        return func(params, x)

    def backward(residuals: Any, cotangent: Any) -> Any:
        return residuals(2 * cotangent)

    run.defvjp(lambda params, x: jax.vjp(func, params, x), backward)
    return run


def shard_map(func: Block, mesh: Any) -> Block:
    rows, everywhere = PartitionSpec("data"), PartitionSpec()
    return jax.shard_map(func, mesh=mesh, in_specs=(everywhere, rows), out_specs=rows)


def pallas(func: Block, mesh: Any) -> Block:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (SIZE, SIZE), i) for i in range(2))
        reverse = (row + column == SIZE - 1).astype(x_ref.dtype)
        out_ref[...] = jnp.tanh(x_ref[...] @ reverse)

    def run(params: Any, x: Any) -> Any:
        x = func(params, x)
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=out, interpret=True)(x)

    return run


class Transform(NamedTuple):
    apply: Callable[[Block, Any], Block]
    roundings: float = 0
    """The 16-bit roundings it makes itself, on the longest path."""
    times: int = 1
    """How often it runs its function in a row; a derivative pass counts twice."""
    forward: bool = True
    """Whether it can be differentiated forward."""
    reverse: bool = True
    sharded: bool = True
    """Whether it can be in a shard_map."""


TRANSFORMS = {
    "plain": Transform(plain),
    "jit": Transform(jit),
    "vmap": Transform(vmap, roundings=2),
    "grad": Transform(grad, roundings=1, times=3),
    "jvp": Transform(jvp, roundings=3, times=3),
    "scan": Transform(scan, roundings=2, times=TURNS),
    "while": Transform(while_, roundings=1, times=TURNS, reverse=False),
    "cond": Transform(cond, roundings=1),
    "remat": Transform(remat),
    "custom_jvp": Transform(custom_jvp),
    "custom_vjp": Transform(custom_vjp, forward=False),
    "shard_map": Transform(shard_map, sharded=False),
    "pallas": Transform(pallas, roundings=2, reverse=False, sharded=False),
}


def exists(outer: str, inner: str) -> bool:
    """Whether JAX itself can run one inside the other."""
    inside = TRANSFORMS[inner]
    if outer == "plain" != inner:
        return False  # As is the other way around.
    if outer == "grad" and not inside.reverse:
        return False
    if outer == "jvp" and not inside.forward:
        return False
    return outer != "shard_map" or inside.sharded


def has_gradient(outer: str, inner: str) -> bool:
    a, b = TRANSFORMS[outer], TRANSFORMS[inner]
    # The rule of `custom_jvp` differentiates its function forward.
    return a.reverse and b.reverse and (outer != "custom_jvp" or b.forward)


# What training code nests.
COMMON = ("vmap", "grad", "scan", "remat", "custom_vjp")


def on_every_change(outer: str, inner: str) -> bool:
    """Each alone, those of training code in each other, and each outside and inside two more."""
    if inner == "plain" or {outer, inner} <= set(COMMON):
        return True
    names = list(TRANSFORMS)[1:]
    return (names.index(inner) - names.index(outer)) % len(names) in (1, 5)


def marks(outer: str, inner: str) -> Any:
    return [] if on_every_change(outer, inner) else [pytest.mark.slow]


PAIRS = [
    pytest.param(outer, inner, marks=marks(outer, inner))
    for outer in TRANSFORMS
    for inner in TRANSFORMS
    if exists(outer, inner)
]
every_pair = pytest.mark.parametrize(("outer", "inner"), PAIRS)
every_format = pytest.mark.parametrize("policy", ["bf16", "f16"])


def composed(outer: str, inner: str, mesh: Any) -> Block:
    return TRANSFORMS[outer].apply(TRANSFORMS[inner].apply(block, mesh), mesh)


# Roundings to 16 bits on the longest path through the layer: of x, w and b as they enter (3), of
# the dot (1), of the sum with the bias (1), of the tanh, which is computed in float32 (1).
LAYER = 6
# A backward pass multiplies by the rounded derivative of each operation and rounds the product.
BACKWARD = 2


def tolerance(outer: str, inner: str, policy: str, *, gradient: bool) -> float:
    """How far from float32 the result may be, relative to its norm.

    Each rounding is wrong by at most half an epsilon of its result. The weights are orthogonal and
    tanh contracts, so that no operation amplifies the error of its operand beyond the size that its
    result has relative to it, and to first order the errors add up. A function that runs `times` in
    a row makes its roundings as often.
    """
    a, b = TRANSFORMS[outer], TRANSFORMS[inner]
    roundings = a.roundings + a.times * (b.roundings + b.times * LAYER)
    if gradient:
        # The mean square that is differentiated: in float32 but for its rounded input.
        roundings = (roundings + 1) * (1 + BACKWARD)
    return roundings * halfstep.FORMATS[policy].eps / 2


@functools.cache
def inputs() -> tuple[Params, Any]:
    w, b, x = jax.random.split(jax.random.key(0), 3)
    orthogonal = jnp.linalg.qr(jax.random.normal(w, (SIZE, SIZE)))[0]
    return Params(orthogonal, jax.random.normal(b, (SIZE,)) / 4), jax.random.normal(x, (SIZE, SIZE))


def value_and_grad(func: Block) -> Callable[..., tuple[Any, Any]]:
    """The function's value, and the gradient of its mean square."""

    def loss(params: Any, x: Any) -> Any:
        out = func(params, x)
        return jnp.mean(out**2), out

    def both(params: Any, x: Any) -> tuple[Any, Any]:
        (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(params, x)
        return out, gradient

    return both


def with_gradient(func: Block, outer: str, inner: str) -> Callable[..., tuple[Any, Any]]:
    if has_gradient(outer, inner):
        return value_and_grad(func)
    return lambda params, x: (func(params, x), None)


def fast(func: Callable) -> Any:
    # Optimizations are most of the compile time and change nothing here.
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(func, compiler_options=options)


@functools.cache
def reference(outer: str, inner: str, mesh: Any) -> tuple[Any, Any]:
    """Value and gradient in float32."""
    return fast(with_gradient(composed(outer, inner, mesh), outer, inner))(*inputs())


def outside_of_kernels(jaxpr: Any) -> Iterator[Any]:
    """All equations but those of Pallas kernels, which run as they were written."""
    for equation in (jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr).eqns:
        yield equation
        if equation.primitive.name == "pallas_call":
            continue
        for parameter in jtu.tree_leaves(
            list(equation.params.values()),
            is_leaf=lambda p: isinstance(p, core.Jaxpr | ClosedJaxpr),
        ):
            if isinstance(parameter, core.Jaxpr | ClosedJaxpr):
                yield from outside_of_kernels(parameter)


def dot_dtypes(jaxpr: Any) -> list[tuple[np.dtype, ...]]:
    return [
        tuple(operand.aval.dtype for operand in equation.invars)
        for equation in outside_of_kernels(jaxpr)
        if equation.primitive.name == "dot_general"
    ]


def distance(ours: Any, theirs: Any) -> float:
    """The distance of two trees relative to the second, all leaves as one vector."""
    a, b = (
        np.concatenate([np.asarray(x).ravel() for x in jtu.tree_leaves(tree)])
        for tree in (ours, theirs)
    )
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def dtypes(tree: Any) -> Any:
    return jtu.tree_map(lambda x: (x.shape, x.dtype), tree)


# In the other format, which takes as long again, with the slow tests only.
@pytest.mark.rows(2)
@pytest.mark.parametrize("policy", ["bf16", pytest.param("f16", marks=pytest.mark.slow)])
@every_pair
def test_two_deep(outer: str, inner: str, policy: str, mesh: jax.sharding.Mesh):
    expected, gradient = reference(outer, inner, mesh)
    func = autocast(composed(outer, inner, mesh), policy)
    traced = fast(with_gradient(func, outer, inner)).trace(*inputs())
    for jaxpr in (jax.make_jaxpr(func)(*inputs()), traced.jaxpr):
        found = dot_dtypes(jaxpr)
        assert found
        assert set(found) == {(halfstep.FORMATS[policy].dtype,) * 2}

    ours, our_gradient = traced.lower().compile()(*inputs())
    assert dtypes(ours) == dtypes(expected)
    assert dtypes(our_gradient) == dtypes(gradient)
    assert distance(ours, expected) <= tolerance(outer, inner, policy, gradient=False)
    if gradient is not None:
        assert distance(our_gradient, gradient) <= tolerance(outer, inner, policy, gradient=True)


@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp"])
def test_the_rules_are_recognizable(name: str, mesh: jax.sharding.Mesh):
    # Without it the gradients above would agree also where a rule is lost.
    _, gradient = reference("plain", "plain", mesh)
    _, doubled = reference(name, "plain", mesh)
    assert distance(doubled, gradient) == pytest.approx(1, rel=1e-6)
