"""qwix, on a function as the body of a Linen module, with products in 8 bits."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from benchmarks._peers import _jax, _probe

qwix: Any = importlib.import_module("qwix")

RULE = qwix.QtRule(
    op_names=("dot_general",),
    weight_qtype=jnp.float8_e4m3fn,
    act_qtype=jnp.float8_e4m3fn,
    bwd_qtype=jnp.float8_e5m2,
)


class Body(linen.Module):
    """A function of a parameter."""

    func: Callable[..., Any]
    weight: Any

    @linen.compact
    def __call__(self, *args: Any) -> Any:
        return self.func(self.param("w", lambda _: self.weight), *args)


def gradient(loss: Callable[..., Any], scaling: Any, has_aux: bool = False) -> Any:
    del scaling

    def call(weight: Any, *args: Any) -> Any:
        net = qwix.quantize_model(Body(loss, weight), qwix.QtProvider([RULE]))
        params = {"params": {"w": weight}}
        value, grads = jax.value_and_grad(net.apply, has_aux=has_aux)(params, *args)
        value, aux = value if has_aux else (value, None)
        return value, aux, None, jnp.asarray(True), grads["params"]["w"]

    return call


LIBRARY = _jax.Library(
    gradient=gradient, begin=lambda *_: None, scale=lambda _: None, update=lambda *_: ((), ())
)


def _dense(provider: Any) -> tuple[Any, Any]:
    layer, x = linen.Dense(32, use_bias=False), jnp.ones((16, 32))
    params = layer.init(jax.random.key(0), x)
    net: Any = qwix.quantize_model(layer, provider)
    return jax.grad(lambda p, x: jnp.sum(jnp.tanh(net.apply(p, x))), argnums=(0, 1)), (params, x)


def eight() -> tuple[_probe.Found, _probe.Found]:
    func, args = _dense(qwix.QtProvider([RULE]))
    return _jax.in_8_bits(func, *args)


def products() -> _probe.Found:
    """A layer, and a function that is not a module."""
    func, args = _dense(qwix.QtProvider([RULE]))
    seen = _jax.operands(func, *args)
    low = sum(all("float8" in one for one in pair) for pair in seen)
    error = _probe.error_of(
        lambda: qwix.quantize_model(lambda w, x: x @ w, qwix.QtProvider([RULE]), _jax.W, _jax.X)
    )
    return _probe.count(
        (low == len(seen)) + (error is None),
        2,
        f"A Linen layer: {low} of {len(seen)} products in 8 bits. A function that is not a module: "
        f"{error}.",
    )


def rules() -> _probe.Found:
    """One layer is left alone, by the path of its module."""

    class Two(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            return linen.Dense(32, name="head")(linen.Dense(32, name="body")(x))

    x = jnp.ones((16, 32))
    rule = qwix.QtRule(
        module_path="body", weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn
    )
    net = qwix.quantize_model(Two(), qwix.QtProvider([rule]))
    params = Two().init(jax.random.key(0), x)
    low = ["float8" in pair[0] for pair in _jax.operands(net.apply, params, x)]
    return _probe.decide(
        low == [True, False], f"A rule for `body`: products in 8 bits of body and head are {low}."
    )


PROBES = {
    **{
        name: probe
        for name, probe in _jax.all_of(LIBRARY).items()
        if name in ("carry", "branches", "sums", "shared", "leaves", "statistics", "newest")
    },
    **_probe.absences(qwix, *_probe.LOSS),
    **_probe.absences(qwix, "why", "limit", "microbatches", "release", "memory", "bisect"),
    "products": products,
    "rules": rules,
    "fp8": lambda: eight()[0],
    "fp8_backward": lambda: eight()[1],
    "stored_bytes": _jax.plain_adamw,
    "checkpoint": lambda: _probe.absent(qwix, "state_dict", "loss_scal", "scaler"),
    "no_device": lambda: _probe.imports_without_a_device("qwix"),
}

if __name__ == "__main__":
    _probe.report(PROBES, "qwix", "jax", "flax", "optax")
