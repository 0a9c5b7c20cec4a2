"""What a step of the compressed optimizers takes on a CPU, beside Optax in float32.

One large parameter, in interleaved runs in one process: bfloat16 with 8 more bits in the state and
moments in 8 bits, against `optax` with float32 parameters and float32 state. Gradients are bfloat16
for both. A ratio is one of times on this machine's cores; accelerators are not concerned.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from benchmarks._report import parser, report, table, write
from halfstep import optim

MODULE = "benchmarks.optim_cpu"
Pair = tuple[optim.Transformation, optax.GradientTransformation]


def pairs() -> dict[str, Pair]:
    """Each compressed optimizer, and the one of Optax that it follows."""
    return {
        "adamw": (optim.flash_adamw(1e-3), optax.adamw(1e-3)),
        "lion": (optim.flash_lion(1e-4), optax.lion(1e-4)),
        "sgd": (optim.flash_sgd(1e-2, 0.9), optax.sgd(1e-2, 0.9)),
    }


def compressed(optimizer: optim.Transformation, carried: Any, grads: Any) -> Any:
    """One step of a compressed optimizer."""
    return optimizer.step(*carried, grads)


def in_float32(optimizer: optax.GradientTransformation, carried: Any, grads: Any) -> Any:
    """One step of Optax, with parameters and state of float32."""
    params, state = carried
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def measure(*, rounds: int, shape: tuple[int, int], only: tuple[str, ...] = ()) -> list[dict]:
    """A row for each optimizer: temporaries of both programs, and the ratio of their times."""
    grads = {"w": jax.random.normal(jax.random.key(1), shape, jnp.bfloat16)}
    rows = []
    for name, (ours, theirs) in pairs().items():
        if only and name not in only:
            continue
        params = {"w": jax.random.normal(jax.random.key(0), shape)}
        sides: dict[str, tuple[Callable[..., Any], Any]] = {
            "halfstep": (functools.partial(compressed, ours), ours.prepare(params)),
            "optax": (functools.partial(in_float32, theirs), (params, theirs.init(params))),
        }
        rows.append({"optimizer": name, **_compare(sides, grads, rounds)})
    return rows


def _compare(sides: dict[str, Any], grads: Any, rounds: int) -> dict[str, Any]:
    size = grads["w"].size
    programs, carried, row = {}, {}, {}
    for side, (step, begin) in sides.items():
        carried[side] = begin
        program = jax.jit(step, donate_argnums=0).lower(begin, grads).compile()
        memory = program.memory_analysis()
        if memory is None:
            raise SystemExit("this backend does not report memory")
        programs[side] = program
        row[f"{side}_temporaries"] = round(memory.temp_size_in_bytes / size, 3)
    times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    rng = np.random.default_rng(0)
    for _ in tqdm(range(rounds), desc="time", unit="round"):
        for side in rng.permutation(list(sides)):
            start = time.perf_counter(), time.process_time()
            carried[side] = jax.block_until_ready(programs[side](carried[side], grads))
            end = time.perf_counter(), time.process_time()
            times[side].append((end[0] - start[0], end[1] - start[1]))
    for index, name in enumerate(("time", "cpu_time")):
        mine, other = ([t[index] for t in times[side][1:]] for side in ("halfstep", "optax"))
        if mine:
            row[f"{name}_ratio"] = round(statistics.median(map(float.__truediv__, mine, other)), 3)
            row[f"{name}_ms"] = round(1e3 * statistics.median(mine), 1)
            row[f"optax_{name}_ms"] = round(1e3 * statistics.median(other), 1)
    return row


COLUMNS = {
    "optimizer": "optimizer",
    "time_ratio": "time to optax",
    "cpu_time_ratio": "processor time to optax",
    "halfstep_temporaries": "temporaries, bytes a parameter",
    "optax_temporaries": "of optax",
}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    arguments = parser(MODULE, __doc__ or "")
    arguments.add_argument("--rounds", type=int, default=30, help="interleaved timed runs of each")
    arguments.add_argument("--size", type=int, default=4096, help="rows and columns")
    parsed = arguments.parse_args(argv)
    rows = measure(rounds=parsed.rounds, shape=(parsed.size, parsed.size))
    results = report(
        MODULE,
        {
            "shape": [parsed.size, parsed.size],
            "gradients": "bfloat16",
            "reference": "optax, float32 parameters and state",
            "rounds": parsed.rounds,
            "rows": rows,
        },
        packages=(),
    )
    if parsed.json != "-":
        print(table(rows, COLUMNS))
    write(results, parsed.json)
    return results


if __name__ == "__main__":
    main()
