"""What halfstep's wrapper costs, beside the step written by hand, mpx and jmp.

Two exact figures from the compiled program, instructions and temporary memory, and ratios of times
from interleaved runs in one process. The reference is the hand-written float16 step *without* a
gate, so everything that makes a step safe counts as cost; times are also given beside the
hand-written step that is safe, by a select for each leaf.
"""

import functools
import importlib.util
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import halfstep
from benchmarks._report import parser, report, table, write
from benchmarks._vit import ViT, loss

MODULE = "benchmarks.overhead"
MODEL = {"width": 128, "hidden": 384, "heads": 4, "blocks": 2}
OPTIMIZER = optax.adamw(1e-3)
REFERENCE = "by hand, no gate"
GATED = "by hand, select"
Step = Callable[..., Any]


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


def with_halfstep(gate: Any, params: Any, state: Any, scaling: Any, ledger: Any, x, y, static):
    """The same step with halfstep: a verdict that names the leaf, and a ledger, come with it."""
    model = eqx.combine(params, static)
    # Casting arguments, as all the others do: the wrapper's cost, and not another program's.
    gradient = halfstep.filter_value_and_grad(loss, scaling, policy="f16:inputs")
    value, scaling, finite, grads = gradient(model, x, y)

    def commit(old):
        return halfstep.apply_gradients(old[0], OPTIMIZER, old[1], grads)

    (model, state), ledger = halfstep.transaction(finite, commit, (model, state), ledger, gate=gate)
    return eqx.filter(model, eqx.is_inexact_array), state, scaling, ledger, value


def with_mpx(params: Any, state: Any, scaling: Any, count: Any, x: Any, y: Any, static: Any):
    """The same step with mpx."""
    import mpx

    model = eqx.combine(params, static)
    value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling)(model, x, y)
    model, state = mpx.optimizer_update(model, OPTIMIZER, state, grads, finite)
    return eqx.filter(model, eqx.is_inexact_array), state, scaling, count, value


def with_jmp(params: Any, state: Any, scale: Any, count: Any, x: Any, y: Any, static: Any):
    """The same step with jmp and the glue its README shows."""
    import jmp

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


def variants() -> dict[str, tuple[Step, Callable[[], tuple[Any, Any]]]]:
    """Each step, and the scaling and counter state it begins with."""
    scale = lambda: (jnp.float32(2.0**10), jnp.int32(0))  # noqa: E731
    ours = lambda: (halfstep.DynamicLossScaling(2.0**10), halfstep.Ledger())  # noqa: E731
    made: dict[str, tuple[Step, Callable[[], tuple[Any, Any]]]] = {
        f"by hand, {'no gate' if gate == 'none' else gate}": (
            functools.partial(by_hand, gate),
            scale,
        )
        for gate in ("none", "select", "cond")
    }
    for gate in ("loop", "cond", "select"):
        name = "halfstep" if gate == "loop" else f'halfstep, gate="{gate}"'
        made[name] = (functools.partial(with_halfstep, gate), ours)
    try:
        import mpx

        floor = jnp.ones((), jnp.float32)
        made["mpx"] = (
            with_mpx,
            lambda: (mpx.DynamicLossScaling(jnp.float32(2.0**10), floor), jnp.int32(0)),
        )
    except ImportError:
        print("mpx is not installed and left out: pip install mixed-precision-for-JAX")
    if importlib.util.find_spec("jmp") is not None:
        made["jmp"] = (with_jmp, scale)
    else:
        print("jmp is not installed and left out: pip install jmp")
    return made


def instructions(text: str) -> int:
    """HLO instructions in an optimized program, those inside of fusions included."""
    return len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", text, re.MULTILINE))


def measure(
    *, rounds: int, batch: int, options: dict[str, int], only: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """One row for each variant: exact figures of its program and its interleaved time ratio."""
    key = jax.random.key(0)
    params, static = eqx.partition(ViT(**options, key=key), eqx.is_inexact_array)
    x, y = jax.random.normal(key, (batch, 32, 32, 3)), jnp.arange(batch)
    state = OPTIMIZER.init(params)
    rows, programs, carried = [], {}, {}
    chosen = {name: made for name, made in variants().items() if not only or name in only}
    for name, (step, begin) in tqdm(chosen.items(), desc="compile", unit="step"):
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
    for _ in tqdm(range(rounds), desc="time", unit="round"):
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


COLUMNS = {
    "step": "step",
    "time_ratio": "time",
    "time_ratio_to_gated": "to by hand, select",
    "instruction_ratio": "instructions",
    "temporary_ratio": "temporaries",
    "instructions": "count",
    "temporaries": "bytes",
}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = parser(MODULE, __doc__ or "")
    arguments.add_argument("--rounds", type=int, default=200, help="interleaved timed runs of each")
    arguments.add_argument("--batch", type=int, default=16)
    parsed = arguments.parse_args(argv)
    rows = measure(rounds=parsed.rounds, batch=parsed.batch, options=MODEL)
    results = report(
        MODULE,
        {
            "model": {"kind": "ViT", "image": 32, "patch": 4, "batch": parsed.batch, **MODEL},
            "policy": "f16:inputs",
            "optimizer": "adamw",
            "reference": REFERENCE,
            "rounds": parsed.rounds,
            "rows": rows,
        },
        packages=("mixed-precision-for-JAX", "jmp"),
    )
    if parsed.json != "-":
        print(table(rows, COLUMNS))
    write(results, parsed.json)
    return results


if __name__ == "__main__":
    main()
