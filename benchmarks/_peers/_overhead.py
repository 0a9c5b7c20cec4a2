"""Training steps by hand and with other libraries, and what they cost: nothing of halfstep's.

A library that needs a JAX of its own is measured in its own environment, beside the step by hand
there: `python -m benchmarks._peers._overhead jaxamp`.
"""

import argparse
import functools
import importlib
import importlib.metadata
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.models.vit import ViT, loss

MODEL = {"width": 128, "hidden": 384, "heads": 4, "blocks": 2}
OPTIMIZER = optax.adamw(1e-3)
REFERENCE = "by hand, no gate"
GATED = "by hand, select"
Step = Callable[..., Any]
Variants = Mapping[str, tuple[Step, Callable[[], tuple[Any, Any]]]]
"""Each step, and the scaling and counter state it begins with."""


def cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def by_hand(
    gate: str, params: Any, state: Any, scale: Any, count: Any, x: Any, y: Any, static: Any
):
    """The step as one writes it without a library: cast, scale, differentiate, unscale, gate."""

    def scaled(params):
        model = eqx.combine(cast(params, jnp.float16), static)
        value = loss(model, x.astype(jnp.float16), y)
        return value * scale, value

    grads, value = jax.grad(scaled, has_aux=True)(params)
    grads = jax.tree.map(lambda g: g * (1 / scale), grads)

    def update(params, state):
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    if gate == "none":
        return *update(params, state), scale, count, value
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    if gate == "select":
        new = update(params, state)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, state))
    else:
        new = jax.lax.cond(finite, update, lambda *old: old, params, state)
    grow = count == 1999
    scale = jnp.where(finite, jnp.where(grow, scale * 2, scale), jnp.maximum(scale / 2, 1))
    return *new, scale, jnp.where(finite & ~grow, count + 1, 0), value


def with_mpx(params: Any, state: Any, scaling: Any, count: Any, x: Any, y: Any, static: Any):
    """The same step with mpx."""
    mpx: Any = importlib.import_module("mpx")
    model = eqx.combine(params, static)
    value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling)(model, x, y)
    model, state = mpx.optimizer_update(model, OPTIMIZER, state, grads, finite)
    return eqx.filter(model, eqx.is_inexact_array), state, scaling, count, value


def with_jmp(params: Any, state: Any, scale: Any, count: Any, x: Any, y: Any, static: Any):
    """The same step with jmp and the glue its README shows."""
    jmp: Any = importlib.import_module("jmp")
    # Its loss scale cannot be lowered as an argument, so it enters as its two arrays.
    scaling = jmp.DynamicLossScale(scale, count)

    policy = jmp.get_policy("p=f32,c=f16,o=f32")

    def scaled(params):
        cast_params, cast_x = policy.cast_to_compute((params, x))
        value = loss(eqx.combine(cast_params, static), cast_x, y)
        return scaling.scale(value), value

    grads, value = jax.grad(scaled, has_aux=True)(params)
    grads = scaling.unscale(grads)
    finite = jmp.all_finite(grads)
    updates, new_state = OPTIMIZER.update(grads, state, params)
    new = (optax.apply_updates(params, updates), new_state)
    params, state = jmp.select_tree(finite, new, (params, state))
    scaling = scaling.adjust(finite)
    return params, state, scaling.loss_scale, scaling.counter, value


def with_jaxamp(params: Any, state: Any, scaling: Any, count: Any, x: Any, y: Any, static: Any):
    """The same step with jaxamp, which has no gate."""
    jaxamp: Any = importlib.import_module("jaxamp")

    def full(params: Any, x: Any, y: Any) -> Any:
        return loss(eqx.combine(params, static), x, y)

    func = jaxamp.dynamic_scale_value_and_grad(
        jaxamp.amp(full, compute_dtype=jnp.float16), redo_on_nan=0
    )
    scaling, (value, grads) = func(params, x, y, dynamic_scaler_state=scaling)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, scaling, count, value


def plain() -> tuple[Any, Any]:
    """A scale and a counter."""
    return jnp.float32(2.0**10), jnp.int32(0)


def hand_written() -> Variants:
    """The steps without a library."""
    return {
        f"by hand, {'no gate' if gate == 'none' else gate}": (
            functools.partial(by_hand, gate),
            plain,
        )
        for gate in ("none", "select", "cond")
    }


def instructions(text: str) -> int:
    """HLO instructions in an optimized program, those inside fusions included."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", text, re.MULTILINE))


def measure(
    variants: Variants,
    *,
    rounds: int,
    batch: int,
    options: dict[str, int],
    progress: Callable[..., Iterable[Any]] = lambda things, **_: things,
) -> list[dict[str, Any]]:
    """One row for each variant: exact figures of its program and its interleaved time ratio."""
    key = jax.random.key(0)
    params, static = eqx.partition(ViT(**options, key=key), eqx.is_inexact_array)
    x, y = jax.random.normal(key, (batch, 32, 32, 3)), jnp.arange(batch)
    state = OPTIMIZER.init(params)
    rows, programs, carried = [], {}, {}
    for name, (step, begin) in progress(variants.items(), desc="compile", unit="step"):
        carried[name] = jax.tree.map(jnp.copy, (params, state, *begin()))
        jitted = jax.jit(functools.partial(step, static=static), donate_argnums=(0, 1, 2, 3))
        start = time.perf_counter()
        program = jitted.lower(*carried[name], x, y).compile()
        seconds = time.perf_counter() - start
        memory = program.memory_analysis()
        text = program.as_text()
        if memory is None or text is None:
            raise SystemExit("this backend does not report memory or HLO")
        programs[name] = program
        rows.append(
            {
                "step": name,
                "instructions": instructions(text),
                "temporaries": memory.temp_size_in_bytes,
                "compile_seconds": round(seconds, 2),
            }
        )
    times: dict[str, list[float]] = {name: [] for name in programs}
    rng = np.random.default_rng(0)
    for _ in progress(range(rounds), desc="time", unit="round"):
        # A new order each round, so that no variant always follows the same one.
        for name in rng.permutation(list(programs)):
            start = time.perf_counter()
            out = jax.block_until_ready(programs[name](*carried[name], x, y))
            times[name].append(time.perf_counter() - start)
            carried[name] = out[:4]
    base = next(row for row in rows if row["step"] == REFERENCE)
    for row in rows:
        row["instruction_ratio"] = round(row["instructions"] / base["instructions"], 3)
        row["temporary_ratio"] = round(row["temporaries"] / base["temporaries"], 4)
        for name, other in (("time_ratio", REFERENCE), ("time_ratio_to_gated", GATED)):
            if rounds and other in times:
                pairs = zip(times[row["step"]], times[other], strict=True)
                ratios = [mine / theirs for mine, theirs in pairs]
                row[name] = round(statistics.median(ratios[rounds // 10 :]), 3)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure one library beside the steps by hand, and print its row."""
    options = argparse.ArgumentParser(prog="python -m benchmarks._peers._overhead")
    options.add_argument("library", choices=["jaxamp"])
    options.add_argument("--rounds", type=int, required=True)
    options.add_argument("--batch", type=int, required=True)
    parsed = options.parse_args(argv)
    jaxamp: Any = importlib.import_module("jaxamp")
    state = lambda: (jaxamp.DynamicScalerState(scaler=jnp.float32(2.0**10)), jnp.int32(0))  # noqa: E731
    hand = {name: made for name, made in hand_written().items() if name in (REFERENCE, GATED)}
    rows = measure(
        {**hand, "jaxamp": (with_jaxamp, state)},
        rounds=parsed.rounds,
        batch=parsed.batch,
        options=MODEL,
    )
    versions = {name: importlib.metadata.version(name) for name in ("jaxamp", "jax", "equinox")}
    print(json.dumps({"row": rows[-1], "versions": versions}))


if __name__ == "__main__":
    main()
