"""Steps without end: does anything grow?

    python -m benchmarks.soak --minutes 60 --json FILE

A small language model in float16, with everything on: loss scaling, ledger, recorded steps, live
view, a bad batch now and then, checkpoints in the background, copies compared, the watchdog. Memory
of the host, open files, threads, child processes, files in the folder and compiled programs are
counted all the time; from the first third of the run on, none of them may grow. The exit status is
1 if one does. Needs `halfstep[examples]`.
"""

import gc
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import halfstep
from benchmarks._report import parser, report, resident_bytes, table, write
from halfstep import debug
from halfstep.integrations.orbax import Checkpoints
from halfstep.reliability import Watchdog, replica_check
from tests.models import gpt as _gpt

MODULE = "benchmarks.soak"
SIZES = {"vocabulary": 64, "tokens": 16, "width": 32, "layers": 2}
EVERY = 20
"""Steps between counts."""
WARM = 15 * EVERY
"""Steps before the first count: all programs are compiled, and the folder has its checkpoints."""
FEWEST = 12
"""Counts, however slow the machine is."""
# Allocators keep what they were given: a leak of one small array a step would be 100 times that.
MEMORY = 0.02


class Compiles:
    """How many programs were compiled."""

    def __init__(self) -> None:
        self.count = 0
        listener: Any = self._heard
        jax.monitoring.register_event_duration_secs_listener(listener)

    def _heard(self, event: str, seconds: float, **_: str | int) -> None:
        self.count += event.endswith("backend_compile_duration")


def counts(folder: pathlib.Path, compiles: Compiles) -> dict[str, int]:
    """What there is now."""
    own = pathlib.Path("/proc/self")
    children = sum(_children(task) for task in (own / "task").iterdir())
    return {
        "memory": resident_bytes(),
        "open files": len(os.listdir(own / "fd")),
        "threads": threading.active_count(),
        "child processes": children,
        # Not the files in them: Orbax writes a few more or less each time.
        "checkpoints": len(os.listdir(folder)),
        "compiled programs": compiles.count,
        "live arrays": len(jax.live_arrays()),
    }


def _children(task: pathlib.Path) -> int:
    try:
        return len((task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        # A thread that has ended since it was listed.
        return 0


def step(state: Any, ids: jax.Array, factor: jax.Array) -> Any:
    """One step; a factor that is not finite makes its batch bad."""

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return _gpt.loss(params, ids, heads=2) * factor

    value, scaling, finite, grads = halfstep.filter_value_and_grad(
        loss, state["scaling"], policy="f16", check_finite=True
    )(state["params"], ids)
    optimizer = optax.adamw(1e-3)
    params, optimizer_state = halfstep.optimizer_update(
        state["params"], optimizer, state["optimizer"], grads, finite
    )
    ledger = state["ledger"].record(finite)
    new = {"params": params, "optimizer": optimizer_state, "scaling": scaling, "ledger": ledger}
    return new, value


def soak(seconds: float) -> list[dict[str, int]]:
    """What was counted, in order."""
    params = _gpt.init(**SIZES, key=jax.random.key(0))
    state = {
        "params": params,
        "optimizer": optax.adamw(1e-3).init(params),
        "scaling": halfstep.DynamicLossScaling(2.0**10, period=20),
        "ledger": halfstep.Ledger(limit=50),
    }
    ids = np.random.default_rng(0).integers(0, SIZES["vocabulary"], (64, 4, SIZES["tokens"] + 1))
    recorder, compiles, found = debug.record(step, last=8), Compiles(), []
    log = recorder.init(state, jnp.asarray(ids[0], jnp.int32), jnp.float32(1))
    run = jax.jit(recorder, donate_argnums=(0, 1))
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as name,
        tqdm(total=int(seconds), unit="s") as bar,
        Checkpoints(name, keep=2) as checkpoints,
        Watchdog(300) as watchdog,
        debug.Live(bar=bar, points=64) as live,
    ):
        number = 0
        while time.monotonic() - begin < seconds or len(found) < FEWEST:
            number += 1
            factor = jnp.float32(np.nan if number % 37 == 0 else 1)
            batch = jnp.asarray(ids[number % len(ids)], jnp.int32)
            log, (state, value) = run(log, state, batch, factor)
            live.update(
                number, loss=value, scaling=state["scaling"], ledger=state["ledger"], log=log
            )
            if number % (5 * EVERY) == 0:
                checkpoints.save(number, state)
                log.report()
                replica_check(state, step=number)
            watchdog.tick(number)
            if number % EVERY == 0:
                # What still waits to be written, read or collected is not a leak.
                gc.collect()
                checkpoints.wait()
                live.flush()
                if number > WARM:
                    found.append({"step": number, **counts(pathlib.Path(name), compiles)})
                bar.update(int(time.monotonic() - begin) - bar.n)
    return found


def grown(found: Sequence[dict[str, int]]) -> list[dict[str, Any]]:
    """Of each count: what it was after the first third, and at the end."""
    parts = found[len(found) // 3 : len(found) // 2], found[-max(1, len(found) // 6) :]
    rows = []
    for name in found[0]:
        if name == "step":
            continue
        early, late = (statistics.median(row[name] for row in part) for part in parts)
        allowed = early * (1 + MEMORY) if name == "memory" else early
        rows.append(
            {"what": name, "early": early, "late": late, "grows": late > max(early, allowed)}
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--minutes", type=float, default=60, help="how long (60)")
    parsed = options.parse_args(argv)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    found = soak(60 * parsed.minutes)
    rows = grown(found)
    results = {"steps": found[-1]["step"], "minutes": parsed.minutes, "rows": rows}
    print(table(rows, {name: name for name in rows[0]}), file=sys.stderr)
    write(report(MODULE, results, packages=("orbax-checkpoint",)), parsed.json)
    return 1 if any(row["grows"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
