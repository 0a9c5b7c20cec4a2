"""Steps without end: does anything grow?

    python -m benchmarks.soak --minutes 60 --json FILE

A small language model in float16, with everything on: loss scaling, ledger, recorded steps, live
view, a bad batch now and then, checkpoints in the background, copies compared, the watchdog. Memory
of the host, open files, threads, child processes, files in the folder and compiled programs are
counted all the time; from the first third of the run on, none of them may grow. The exit status is
1 if one does. Needs `halfstep[examples]`.

Orbax itself keeps some memory of every save: TensorStore 0.1.86 does not give back what `to_json`
and its metrics return. So the same arrays are then saved by Orbax alone, and the memory may grow by
what as many saves cost there. With `--control FILE` only that is measured, and added to the results
that FILE has.
"""

import gc
import json
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
import orbax.checkpoint as ocp
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
SAVE_EVERY = 5 * EVERY
"""Steps between checkpoints."""
CONTROL = 100, 400
"""Saves of Orbax alone: those before the first count, and those after."""
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


def start() -> dict[str, Any]:
    """The state before the first step."""
    params = _gpt.init(**SIZES, key=jax.random.key(0))
    return {
        "params": params,
        "optimizer": optax.adamw(1e-3).init(params),
        "scaling": halfstep.DynamicLossScaling(2.0**10, period=20),
        "ledger": halfstep.Ledger(limit=50),
    }


def orbax_alone(warm: int, saves: int) -> float:
    """By how many bytes the memory grows with each save of the state by Orbax itself."""
    arrays = {str(n): leaf for n, leaf in enumerate(jax.tree.leaves(start()))}
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    before = 0
    with (
        tempfile.TemporaryDirectory() as name,
        ocp.CheckpointManager(pathlib.Path(name), options=options) as manager,
    ):
        for number in tqdm(range(warm + saves), unit="save"):
            manager.save(number, args=ocp.args.StandardSave(arrays))
            manager.wait_until_finished()
            if number == warm - 1:
                gc.collect()
                before = resident_bytes()
        gc.collect()
        return (resident_bytes() - before) / saves


def soak(seconds: float) -> list[dict[str, int]]:
    """What was counted, in order."""
    state = start()
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
            if number % SAVE_EVERY == 0:
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
    first, last = (statistics.median(row["step"] for row in part) for part in parts)
    rows = []
    for name in found[0]:
        if name == "step":
            continue
        early, late = (statistics.median(row[name] for row in part) for part in parts)
        rows.append({"what": name, "early": early, "late": late, "steps": last - first})
    return judged(rows, 0.0)


def judged(rows: Sequence[dict[str, Any]], per_save: float) -> list[dict[str, Any]]:
    """The rows with what grows, if Orbax alone keeps so many bytes of each save."""
    allowed = {
        row["what"]: MEMORY * row["early"] + per_save * row["steps"] / SAVE_EVERY
        if row["what"] == "memory"
        else 0
        for row in rows
    }
    return [{**row, "grows": row["late"] > row["early"] + allowed[row["what"]]} for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--minutes", type=float, default=60, help="how long (60)")
    options.add_argument("--control", metavar="FILE", help="measure only Orbax alone, for FILE")
    parsed = options.parse_args(argv)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    if parsed.control is None:
        found = soak(60 * parsed.minutes)
        made = {"steps": found[-1]["step"], "minutes": parsed.minutes, "save_every": SAVE_EVERY}
        made["rows"] = grown(found)
        made = report(MODULE, made, packages=("orbax-checkpoint", "tensorstore"))
        where = parsed.json
    else:
        made = json.loads(pathlib.Path(parsed.control).read_text())
        where = parsed.control
    made["orbax_alone"] = {"saves": CONTROL[1], "bytes_per_save": orbax_alone(*CONTROL)}
    made["rows"] = judged(made["rows"], max(0.0, made["orbax_alone"]["bytes_per_save"]))
    print(table(made["rows"], {name: name for name in made["rows"][0]}), file=sys.stderr)
    write(made, where)
    return 1 if any(row["grows"] for row in made["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
