"""What recording a step and a search cost, and who finds planted faults.

    python -m benchmarks.debug --json FILE

Costs: a ViT and a GPT, mixed precision and AdamW, bare and recorded: ratios of interleaved times in
one process, instructions and temporary memory of the compiled programs, and whether the results
have the same bits. Searches: the time of `debug.first_nonfinite` until its answer, compared with
compiling the step and running it once, interleaved with cleared caches. Faults: the training steps
of `tests._faults`, by `debug.first_nonfinite` and by `jax.debug_nans`. The exit status is 1 if a
bar is missed. Needs `halfstep[examples]`, Flax, and four devices, which it asks of the CPU.
"""

import functools
import linecache
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":  # Before JAX starts.
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    )

import equinox as eqx
import jax
import numpy as np
from tqdm import tqdm

from benchmarks._bars import BASELINE
from benchmarks._models import Model, gpt, vit
from benchmarks._report import parser, report, table, write
from benchmarks._searches import example, programs, searches, small
from benchmarks._steps import OPTIMIZER, float32
from benchmarks.overhead import instructions
from halfstep import autocast, debug
from tests._faults import FAULTS, Fault

MODULE = "benchmarks.debug"
BARS = {"scopes": 1.10, "ops": 1.60}
SEARCH_BAR = 3.0
MODELS = (
    vit("ViT", image=32, patch=4, width=256, hidden=1024, heads=8, blocks=2, classes=10),
    gpt("GPT", vocabulary=256, tokens=128, width=256, layers=4, heads=8),
)
SMALL = (gpt("GPT", vocabulary=64, tokens=16, width=32, layers=2, heads=2),)


def step_of(model: Model) -> Callable[..., Any]:
    """A training step in bfloat16."""
    return float32(autocast(model.loss, "bf16"))


def costs(models: Sequence[Model], *, rounds: int, batch: int) -> list[dict[str, Any]]:
    """One row for each model and kind of recording."""
    rows = []
    for model in models:
        rows += _cost(model, rounds, batch)
    return rows


def _cost(model: Model, rounds: int, batch: int) -> list[dict[str, Any]]:
    params, static = eqx.partition(model.init(jax.random.key(0)), eqx.is_inexact_array)
    data = tuple(map(example, model.batch(batch)))
    state = OPTIMIZER.init(params)
    step = step_of(model)

    def bare(params: Any, state: Any, *data: Any) -> Any:
        params, state, _, value = step(eqx.combine(params, static), state, None, *data)
        return eqx.filter(params, eqx.is_inexact_array), state, value

    recorders = {name: debug.record(bare, sites=name) for name in ("scopes", "ops")}
    logs = {name: found.init(params, state, *data) for name, found in recorders.items()}
    functions: dict[str, Any] = {"bare": lambda log, *args: (log, bare(*args)), **recorders}
    programs, rows = {}, []
    for name, func in tqdm(functions.items(), desc=f"compile {model.name}", unit="step"):
        jitted = jax.jit(func, donate_argnums=0)
        start = time.perf_counter()
        program = jitted.lower(logs.get(name), params, state, *data).compile()
        seconds = time.perf_counter() - start
        memory, text = program.memory_analysis(), program.as_text()
        if memory is None or text is None:
            raise SystemExit("this backend does not report memory or HLO")
        programs[name] = program
        rows.append(
            {
                "model": model.name,
                "sites": name,
                "count": len(logs[name].sites) if name in logs else 0,
                "instructions": instructions(text),
                "temporaries": memory.temp_size_in_bytes,
                "compile_seconds": round(seconds, 1),
            }
        )
    results = {}
    times: dict[str, list[float]] = {name: [] for name in programs}
    rng = np.random.default_rng(0)
    carried: dict[str, Any] = {"bare": None, **logs}
    for _ in tqdm(range(rounds), desc=f"time {model.name}", unit="round"):
        # A new order each round, so that no variant always follows the same one.
        for name in rng.permutation(list(programs)):
            start = time.perf_counter()
            log, results[name] = jax.block_until_ready(
                programs[name](carried[name], params, state, *data)
            )
            times[name].append(time.perf_counter() - start)
            carried[name] = log
    for row in rows:
        name = row["sites"]
        ratios = [a / b for a, b in zip(times[name], times["bare"], strict=True)]
        row["time_ratio"] = round(statistics.median(ratios), 3)
        row["instruction_ratio"] = round(row["instructions"] / rows[0]["instructions"], 3)
        row["temporary_ratio"] = round(row["temporaries"] / rows[0]["temporaries"], 4)
        row["same_bits"] = _same(results[name], results["bare"])
    return rows


def _same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def faults(chosen: Sequence[Fault]) -> list[dict[str, Any]]:
    """One row for each fault: what ours says, and what `jax.debug_nans` says."""
    rows = []
    for fault in tqdm(chosen, desc="faults", unit="fault"):
        found = debug.first_nonfinite(*_called(fault))
        mine = "" if found is None else f"{_place(fault, found.site.source.line, found.site.path)}"
        rows.append(
            {
                "fault": fault.name,
                "framework": fault.framework,
                "pass": fault.stage,
                "found": mine,
                "found_pass": "" if found is None else found.site.stage,
                "is_right": found is not None
                and (found.site.source.line, found.site.stage) == (fault.line, fault.stage)
                and (found.turns, found.shard, found.site.path)
                == (fault.turns, fault.shard, fault.path),
                **_debug_nans(fault),
            }
        )
    return rows


def _called(fault: Fault) -> tuple[Any, ...]:
    func, args = fault.make()
    return func, *args


def _place(fault: Fault, line: int, path: str) -> str:
    if path:
        return path
    return "the line" if line == fault.line else f"line {line}, not {fault.line}"


def _debug_nans(fault: Fault) -> dict[str, Any]:
    """What JAX's own switch says of a jitted step: the innermost line of the file."""
    func, *args = _called(fault)
    try:
        with jax.debug_nans(True):
            jax.block_until_ready(eqx.filter_jit(func)(*args))
    except FloatingPointError as error:
        linecache.checkcache()
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f.lineno for f in frames if os.path.basename(f.filename) == fault.file]
        inside = [line for line in lines if line == fault.line]
        said = "the line" if inside else "another line" if lines else "an error without the line"
        return {"debug_nans": said, "debug_nans_is_right": bool(inside)}
    except Exception as error:  # It stops some programs from running at all.
        return {"debug_nans": type(error).__name__, "debug_nans_is_right": False}
    return {"debug_nans": "nothing", "debug_nans_is_right": False}


def bars(
    rows: Sequence[dict[str, Any]],
    found: Sequence[dict[str, Any]],
    searched: Sequence[dict[str, Any]],
) -> dict[str, bool]:
    """What has to hold."""
    made = {
        f"{row['model']}, {row['sites']}: at most {BARS[row['sites']]:.2f}x": BASELINE
        <= row["time_ratio"]
        <= BARS[row["sites"]]
        for row in rows
        if row["sites"] in BARS
    }
    for row in searched:
        name = f"search, {row['program']}, {row['pass']}: at most {SEARCH_BAR:g}x, in the pass"
        made[name] = row["ratio"] <= SEARCH_BAR and row["found_pass"] == row["pass"]
    made[f"all of {len(found)} faults: line, pass, turn and shard"] = all(
        row["is_right"] for row in found
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--rounds", type=int, default=60, help="interleaved timed runs of each")
    options.add_argument("--quick", action="store_true", help="a tiny model, for tests")
    parsed = options.parse_args(argv)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    if parsed.quick:
        rows, found = costs(SMALL, rounds=2, batch=2), faults(FAULTS[:2])
        searched = searches(small(), rounds=1)
    else:
        # Searches first: they clear the caches of the others.
        searched = searches(programs(), rounds=3)
        rows, found = costs(MODELS, rounds=parsed.rounds, batch=16), faults(FAULTS)
    results = {
        "costs": rows,
        "searches": searched,
        "faults": found,
        "bars": bars(rows, found, searched),
    }
    names = ("model", "sites", "count", "time_ratio", "instruction_ratio", "temporary_ratio")
    show = functools.partial(print, file=sys.stderr)
    show(table(rows, {name: name for name in (*names, "same_bits")}))
    show(table(searched, {n: n for n in ("program", "pass", "found", "found_pass", "ratio")}))
    show(table(found, {n: n for n in ("fault", "pass", "found", "is_right", "debug_nans")}))
    for bar, met in results["bars"].items():
        show("met   " if met else "MISSED", bar)
    write(report(MODULE, results, packages=("equinox", "flax", "optax")), parsed.json)
    return 0 if all(results["bars"].values()) or parsed.quick else 1


if __name__ == "__main__":
    sys.exit(main())
