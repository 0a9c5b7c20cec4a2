"""One small program per structured primitive; each names the primitive by which it is found."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec as P

from halfstep._program import structures

X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
W = jnp.stack([X, X.T, X + 1.0])


class Example(NamedTuple):
    """A function, its arguments, and the structure that its program holds."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kind: type[structures.Structure]


def scanned(w, x):
    def body(carry, layer):
        made = jnp.tanh(carry @ layer + x)
        return made, made.sum()

    return jax.lax.scan(body, x, w, reverse=True, unroll=2)


def counted(x):
    return jax.lax.fori_loop(0, 3, lambda i, c: c * 0.5 + x, x)


def repeated(x):
    limit = x.max() + 2.0
    return jax.lax.while_loop(lambda c: c[0].max() < limit, lambda c: (c[0] + x**2 + 1.0,), (x,))


def branched(x):
    return jax.lax.switch(1, [lambda v: v, jnp.sin, jnp.cos], x)


@jax.jit
def called(x):
    return x @ x


@jax.checkpoint
def recomputed(x):
    return jnp.sin(x @ x)


@jax.custom_jvp
def own_jvp(x, y):
    return jnp.sin(x) * y


@own_jvp.defjvp
def _own_jvp_rule(primals, tangents):
    (x, y), (dx, dy) = primals, tangents
    return own_jvp(x, y), jnp.cos(x) * y * dx + jnp.sin(x) * dy


@jax.custom_vjp
def own_vjp(x, y):
    return x @ y


own_vjp.defvjp(
    lambda x, y: (x @ y, (x, jnp.sin(y), y)), lambda kept, g: (g @ kept[2].T, kept[0].T @ g)
)


def mapped(x):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(lambda v: v * 2.0, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


def solved(x):
    matrix = x @ x.T + 8.0 * jnp.eye(4)
    return jax.lax.custom_linear_solve(
        lambda v: matrix @ v, x[0], lambda _, b: jnp.linalg.solve(matrix, b), symmetric=True
    )


def root(x):
    return jax.lax.custom_root(
        lambda v: v**2 - x.sum() - 9.0,
        jnp.float32(2.0),
        lambda f, guess: jax.lax.fori_loop(0, 9, lambda _, v: v - f(v) / (2.0 * v), guess),
        lambda g, y: y / g(jnp.float32(1.0)),
    )


def kernel(x):
    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(double, out_shape=shape, interpret=True)(x)


@jax.custom_batching.custom_vmap
def own_vmap(x):
    return x @ x


@own_vmap.def_vmap
def _own_vmap_rule(size, is_mapped, x):
    return own_vmap(x[0])[None].repeat(size, 0), True


def composite(x):
    return jax.lax.composite(lambda v: v @ v, "test.square")(x)


def linear(x):
    return jax.custom_derivatives.linear_call(
        lambda kept, v: kept * v, lambda kept, v: kept * v, jnp.float32(2.0), x
    )


# `custom_root` is a call with derivatives of its own up to JAX 0.10, and a class since then.
_ROOT = structures.CustomJvp if jax.__version_info__ < (0, 11) else structures.Opaque
EXAMPLES = {
    "scan": Example(scanned, (W, X), structures.Scan),
    "fori_loop": Example(counted, (X,), structures.Scan),
    "while_loop": Example(repeated, (X,), structures.While),
    "switch": Example(branched, (X,), structures.Cond),
    "jit": Example(called, (X,), structures.Jit),
    "checkpoint": Example(recomputed, (X,), structures.Remat),
    "custom_jvp": Example(own_jvp, (X, X), structures.CustomJvp),
    "custom_vjp": Example(own_vjp, (X, X), structures.CustomVjp),
    "shard_map": Example(mapped, (X,), structures.ShardMap),
    "custom_linear_solve": Example(solved, (X,), structures.LinearSolve),
    "custom_root": Example(root, (X,), _ROOT),
    "pallas_call": Example(kernel, (X,), structures.Opaque),
    "custom_vmap": Example(own_vmap, (X,), structures.CustomVmap),
    "composite": Example(composite, (X,), structures.Opaque),
    "linear_call": Example(linear, (X,), structures.Opaque),
}
