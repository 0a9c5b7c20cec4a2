"""Functions that have exactly one fault each, and the same without it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

F32, BF16 = jnp.float32, jnp.bfloat16
WIDTH, BATCH = 1024, 2048


def shape(*sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


W, X = shape(WIDTH, WIDTH), shape(BATCH, WIDTH)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A function with one finding."""

    kind: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    what: str
    """A part of what it says."""
    fix: str
    policy: str = "bf16"
    line: str = ""
    """A part of the source line that it points to."""


def tiny_constant(w: Any, x: Any) -> Any:
    hidden = x @ w + 1e-8
    return jnp.sum(hidden @ w)


def huge_constant(w: Any, x: Any) -> Any:
    hidden = jnp.where(x > 0, x @ w, -1e9)
    return jnp.sum(jax.nn.relu(hidden) @ w)


def float32_argument(w: Any, x: Any, noise: Any) -> Any:
    hidden = x @ w
    hidden = hidden + noise
    return jnp.sum(hidden @ w)


def float32_argument_in_a_loop(w: Any, x: Any, noise: Any) -> Any:
    def body(carry: Any, _: Any) -> Any:
        return (carry @ w + noise) @ w, None

    return jnp.sum(jax.lax.scan(body, x @ w, length=3)[0] @ w)


def converted(w: Any, x: Any, steps: Any) -> Any:
    hidden = (x @ w) * steps.astype(F32)
    return jnp.sum(hidden @ w)


def widened_by_hand(w: Any, x: Any, gate: Any) -> Any:
    hidden = (x @ w) * gate.astype(F32)
    return jnp.sum(hidden @ w)


def summed_in_16_bits(w: Any, x: Any) -> Any:
    hidden = (x @ w).astype(BF16)
    return jnp.sum(jnp.cumsum(hidden, axis=1).astype(F32))


def stored_in_float32(w: Any, x: Any) -> Any:
    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return x * 2

    def forward(x: Any) -> Any:
        return x * 2, jnp.exp(x)

    def backward(kept: Any, g: Any) -> Any:
        return (g * kept,)

    scaled.defvjp(forward, backward)
    return jnp.sum(scaled(x @ w) @ w)


def copied(params: Any, x: Any) -> Any:
    low = jax.tree.map(lambda p: p.astype(BF16), params)
    return jnp.sum((x.astype(BF16) @ low["up"] @ low["down"]).astype(F32))


def asks_for_precision(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.dot(x, w, precision="highest"))


def kernel(w: Any, x: Any) -> Any:
    def body(x: Any, w: Any, out: Any) -> None:
        out[...] = jnp.dot(x[...], w[...])

    out = jax.ShapeDtypeStruct((BATCH, WIDTH), F32)
    return pl.pallas_call(body, out_shape=out, interpret=True)(x, w)


# A primitive that nobody knows.
doubled = Primitive("doubled")
doubled.def_impl(lambda x: x * 2)
doubled.def_abstract_eval(lambda x: x)
mlir.register_lowering(doubled, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
ad.deflinear2(doubled, lambda cotangent, x: [doubled.bind(cotangent)])


def unknown(w: Any, x: Any) -> Any:
    return jnp.sum(doubled.bind(x @ w) @ w)


def scaled_up(w: Any, x: Any) -> Any:
    with jax.named_scope("head"):
        scores = (x @ w) * 512.0
    return jnp.sum(jax.nn.softmax(scores))


VECTOR = shape(BATCH, 1)
PARAMS = {"up": W, "down": W}
INTS, HALF = shape(BATCH, WIDTH, dtype=jnp.int32), shape(BATCH, WIDTH, dtype=BF16)

FAULTS = (
    Fault("promotion", tiny_constant, (W, X), "1e-08, which vanishes in f16", "6.1e-05", "f16"),
    Fault("promotion", huge_constant, (W, X), "-1e+09, which f16 cannot hold", "jnp.inf", "f16"),
    Fault("promotion", float32_argument, (W, X, X), "argument `noise`", "astype(jnp.bfloat16)"),
    Fault("promotion", float32_argument_in_a_loop, (W, X, X), "argument `noise`", "astype"),
    Fault("promotion", converted, (W, X, INTS), "`convert_element_type`", "jnp.bfloat16"),
    Fault("promotion", widened_by_hand, (W, X, HALF), "`convert_element_type`", "jnp.bfloat16"),
    Fault("low-precision reduction", summed_in_16_bits, (W, X), "`cumsum`", "astype(jnp.float32)"),
    Fault("float32 residual", stored_in_float32, (W, X), "f32[2048,1024]", "jax.checkpoint"),
    Fault("model copy", copied, (PARAMS, X), "cast to bf16", "leave the cast out"),
    Fault("contraction not lowered", asks_for_precision, (W, X), "HIGHEST", "op:dot_general="),
    Fault("contraction not lowered", kernel, (W, X), "a kernel", "astype(jnp.bfloat16)"),
    Fault("unknown operation", unknown, (W, X), "`doubled`", "op:doubled=compute"),
    Fault("range", scaled_up, (W, X), "multiplied by 512", "op:dot_general@head=accumulate", "f16"),
)
