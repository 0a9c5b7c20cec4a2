"""mpx, with the step of its README."""

import importlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from benchmarks._peers import _jax, _probe

mpx: Any = importlib.import_module("mpx")


def gradient(loss: Callable[..., Any], scaling: Any, has_aux: bool = False) -> Any:
    def call(*args: Any) -> Any:
        made = mpx.filter_value_and_grad(loss, scaling, has_aux=has_aux)(*args)
        value, scaling_, finite, grads = made
        value, aux = value if has_aux else (value, None)
        return value, aux, scaling_, finite, grads

    return call


def begin(scale: float, period: int = 2000) -> Any:
    return mpx.DynamicLossScaling(jnp.float32(scale), jnp.float32(0.5), period=period)


LIBRARY = _jax.Library(
    gradient=gradient,
    begin=begin,
    scale=lambda scaling: scaling.loss_scaling,
    update=mpx.optimizer_update,
    select=mpx.select_tree,
    floor=0.5,
)


def rules() -> _probe.Found:
    """A function is kept in float32 where it is called, in the model's own code."""
    wide = mpx.force_full_precision(lambda x: jnp.sum(x), jnp.float32)
    kept = wide(jnp.full(4096, 256.0, jnp.float16))
    assert float(kept) == 2**20
    _probe.absent(mpx, "policy", "rule")
    return _probe.Found(
        "partly",
        "`force_full_precision` wraps a call in the model's code; its README lists no rule.",
    )


PROBES = {
    **_jax.all_of(LIBRARY),
    **_probe.absences(mpx, *_probe.TOOLS),
    "rules": rules,
    "stored_bytes": _jax.plain_adamw,
    "no_device": lambda: _probe.imports_without_a_device("mpx"),
}

if __name__ == "__main__":
    _probe.report(PROBES, "mixed-precision-for-JAX", "jax", "equinox", "optax")
