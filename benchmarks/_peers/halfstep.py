"""halfstep itself, by the same probes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import halfstep
from benchmarks._peers import _jax, _probe
from halfstep import debug, optim

POLICY = "f16"


def gradient(loss: Callable[..., Any], scaling: Any, has_aux: bool = False, **options: Any) -> Any:
    def call(*args: Any) -> Any:
        func = halfstep.filter_value_and_grad(
            loss, scaling, policy=POLICY, has_aux=has_aux, **options
        )
        value, new, finite, grads = func(*args)
        value, aux = value if has_aux else (value, None)
        return value, aux, new, finite, grads

    return call


LIBRARY = _jax.Library(
    gradient=gradient,
    begin=lambda scale, period=2000: halfstep.DynamicLossScaling(scale, 0.5, period=period),
    scale=lambda scaling: scaling.loss_scaling,
    update=halfstep.optimizer_update,
    select=halfstep.select_tree,
    floor=0.5,
    axis=lambda loss, scaling: gradient(loss, scaling, axis_names="data"),
)


def _product(w: Any, x: Any) -> Any:
    with jax.named_scope("head"):
        return jnp.sum(x @ w)


def rules() -> _probe.Found:
    seen = [
        _jax.dots(halfstep.autocast(_product, policy), _jax.W, _jax.X)
        for policy in ("f16", "f16,op:dot_general=float32", "f16,scope:head=float32")
    ]
    return _probe.decide(
        seen == [["float16"], ["float32"], ["float32"]],
        f"The product is in {seen[0][0]}, and by a rule for the operation or the scope in "
        f"{seen[1][0]}.",
    )


def why() -> _probe.Found:
    report = halfstep.explain(lambda w, x: jnp.sum(jax.nn.softmax(x @ w)), "bf16")(_jax.W, _jax.X)
    reasons = {e.name: e.reason for e in report.operations}
    return _probe.decide(bool(reasons.get("exp")), f"`exp`: {reasons.get('exp')}.")


def limit() -> _probe.Found:
    ledger = halfstep.Ledger(limit=2).record(False).record(False)
    error = _probe.error_of(ledger.check)
    return _probe.decide(error is not None, f"After two bad steps in a row: {error}.")


def microbatches() -> _probe.Found:
    scaling = halfstep.DynamicLossScaling(2.0**10)
    func = halfstep.filter_value_and_grad(
        _jax.dot, scaling, policy=POLICY, microbatches=2, batch=("x",)
    )
    good = func(jnp.ones(2), jnp.full(4, 0.5).reshape(2, 2))[2]
    bad = func(jnp.ones(2), jnp.full((2, 2), 0.5).at[1].set(jnp.inf))
    scale = float(bad[1].loss_scaling)
    return _probe.decide(
        bool(good) and not bad[2] and scale == 512,
        f"One of two microbatches is bad: one step is skipped, and the scale is {scale:g} "
        "instead of 1024.",
    )


def _layer(w: Any, x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w))


EIGHT = (
    jax.grad(halfstep.autocast(_layer, "f8"), argnums=(0, 1)),
    jnp.ones((32, 32)),
    jnp.ones((32, 32)),
)


def stored_bytes() -> _probe.Found:
    params = jnp.zeros((1024, 1024))
    return _jax.stored(optim.flash_adamw(1e-3).prepare(params), params.size)


def release() -> _probe.Found:
    """A step that updates each layer on the way back."""
    step = optim.release(
        lambda params, x, outer, batch: x + jnp.tanh(x @ params["w"]),
        optax.sgd(0.1),
        first=lambda outer, batch: batch @ outer["enter"],
        last=lambda outer, x, batch: jnp.mean(jnp.square(x)),
    )
    params = {"outer": {"enter": jnp.eye(4)}, "layers": {"w": jnp.full((3, 4, 4), 0.1)}}
    _, new, _ = jax.jit(step)(params, step.init(params), _jax.X)
    moved = int(jnp.sum(jnp.any(new["layers"]["w"] != params["layers"]["w"], axis=(1, 2))))
    return _probe.decide(moved == 3, f"A step of `optim.release` moves {moved} of 3 layers.")


def memory() -> _probe.Found:
    """The program is compiled for a card that is not there."""
    shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    report = halfstep.preflight(jax.grad(_layer), (shape, shape), targets="h100", progress=False)
    peak = report["h100"].peak_bytes or 0
    return _probe.decide(peak > 0, f"The gradient of a layer takes {peak:,} bytes on an H100.")


def bisect() -> _probe.Found:
    """One of two scopes overflows in float16."""

    def loss(w: Any, x: Any) -> Any:
        with jax.named_scope("calm"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("steep"):
            x = x @ w
            return jnp.mean(jnp.sqrt(jnp.square(x * 10000) + 1) / 10000)

    found = debug.bisect(
        loss,
        [(_jax.W, _jax.X)],
        "f16,op:*=compute",
        tolerance=0.05,
        refine=False,
        progress=False,
    )
    scopes = {rule.scope for rule in found.rules}
    return _probe.decide(scopes == {"steep"}, f"Found what has to stay in float32: {scopes}.")


PROBES = {
    **_jax.all_of(LIBRARY),
    "rules": rules,
    "why": why,
    "limit": limit,
    "microbatches": microbatches,
    "fp8": lambda: _jax.in_8_bits(*EIGHT)[0],
    "fp8_backward": lambda: _jax.in_8_bits(*EIGHT)[1],
    "stored_bytes": stored_bytes,
    "release": release,
    "memory": memory,
    "bisect": bisect,
    "no_device": lambda: _probe.imports_without_a_device("halfstep"),
}

if __name__ == "__main__":
    _probe.report(PROBES, "halfstep", "jax", "equinox", "optax")
