"""jmp, with the glue of its README."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks._peers import _jax, _probe

jmp: Any = importlib.import_module("jmp")

POLICY = jmp.get_policy("params=float32,compute=float16,output=float32")


def gradient(loss: Callable[..., Any], scaling: Any, has_aux: bool = False) -> Any:
    def call(params: Any, *args: Any) -> Any:
        def scaled(params: Any) -> Any:
            made = loss(*POLICY.cast_to_compute((params, *args)))
            value, aux = made if has_aux else (made, None)
            return scaling.scale(POLICY.cast_to_output(value)), (value, aux)

        grads, (value, aux) = jax.grad(scaled, has_aux=True)(params)
        grads = scaling.unscale(grads)
        finite = jmp.all_finite(grads)
        return value, aux, scaling.adjust(finite), finite, grads

    return call


def update(params: Any, optimizer: Any, state: Any, grads: Any, finite: Any) -> Any:
    updates, new = optimizer.update(grads, state, params)
    return jmp.select_tree(finite, (optax.apply_updates(params, updates), new), (params, state))


LIBRARY = _jax.Library(
    gradient=gradient,
    begin=lambda scale, period=2000: jmp.DynamicLossScale(
        jnp.float32(scale), period=period, min_loss_scale=jnp.float32(0.5)
    ),
    scale=lambda scaling: scaling.loss_scale,
    update=update,
    select=jmp.select_tree,
    floor=0.5,
)


def rules() -> _probe.Found:
    """A policy is applied by hand, to what is cast by hand."""
    found = {name for name in dir(POLICY) if name.startswith("cast_")}
    assert found == {"cast_to_compute", "cast_to_output", "cast_to_param"}, found
    _probe.absent(jmp, "rule", "scope", "primitive")
    return _probe.Found(
        "partly",
        "A policy has three casts, which a module calls by hand; its README lists no rule.",
    )


PROBES = {
    **_jax.all_of(LIBRARY),
    **_probe.absences(jmp, *_probe.TOOLS),
    "rules": rules,
    "stored_bytes": _jax.plain_adamw,
    "no_device": lambda: _probe.imports_without_a_device("jmp"),
}

if __name__ == "__main__":
    _probe.report(PROBES, "jmp", "jax", "optax")
