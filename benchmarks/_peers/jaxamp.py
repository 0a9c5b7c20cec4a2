"""jaxamp, with the step of its README, on the JAX that it was written for."""

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks._peers import _jax, _probe

jaxamp: Any = importlib.import_module("jaxamp")


def gradient(loss: Callable[..., Any], scaling: Any, has_aux: bool = False) -> Any:
    def call(*args: Any) -> Any:
        low = jaxamp.amp(loss, compute_dtype=jnp.float16)
        func = jaxamp.dynamic_scale_value_and_grad(low, has_aux=has_aux, redo_on_nan=0)
        new, (value, grads) = func(*args, dynamic_scaler_state=scaling)
        value, aux = value if has_aux else (value, None)
        # It returns no verdict: a good step is one that does not count as a reset.
        return value, aux, new, new.total_resets == scaling.total_resets, grads

    return call


def update(params: Any, optimizer: Any, state: Any, grads: Any, finite: Any) -> Any:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


LIBRARY = _jax.Library(
    gradient=gradient,
    begin=lambda scale, period=2000: jaxamp.DynamicScalerState(
        patience=jnp.int32(period), scaler=jnp.float32(scale)
    ),
    scale=lambda scaling: scaling.scaler,
    update=update,
)


def rules() -> _probe.Found:
    """One operation kept in float32 by a policy of its own, from outside."""
    kept = {**jaxamp.default_amp_policy, jax.lax.dot_general_p: jaxamp.use_original_precision}
    func = jaxamp.amp(lambda w, x: x @ w, compute_dtype=jnp.float16, amp_policy=kept)
    without = jaxamp.amp(lambda w, x: x @ w, compute_dtype=jnp.float16)
    seen = [_jax.dots(f, _jax.W, _jax.X) for f in (without, func)]
    return _probe.decide(
        seen == [["float16"], ["float32"]],
        f"The product is in {seen[0][0]}, and by a policy for `dot_general` in {seen[1][0]}.",
    )


def limit() -> _probe.Found:
    """Bad steps are counted, and nothing is done about them."""
    scaling = LIBRARY.begin(1.0)
    for _ in range(3):
        scaling = gradient(_jax.dot, scaling)(jnp.ones(1), jnp.full(1, jnp.nan))[2]
    assert int(scaling.total_resets) == 3
    _probe.absent(jaxamp, "ledger", "skipped", "limit", "check")
    return _probe.Found("partly", "`total_resets` is 3 after 3 bad steps; nothing reads it.")


PROBES = {
    **_jax.all_of(LIBRARY),
    **_probe.absences(jaxamp, *_probe.TOOLS),
    "limit": limit,
    "rules": rules,
    "stored_bytes": _jax.plain_adamw,
    "no_device": lambda: _probe.imports_without_a_device("jaxamp"),
}

if __name__ == "__main__":
    _probe.report(PROBES, "jaxamp", "jax", "equinox", "optax")
