"""Does a check at rest find every flipped bit, and nothing else? What does it cost?

    python -m benchmarks.rest --json benchmarks/results/rest.json

`examples.gpt_fsdp`, small, on four devices of this machine, data-parallel and fully sharded, in
float16 with AdamW, and in fp8 with a flash optimizer. `rest_check` takes digests of the whole state
after every step and compares them before the next. In 4 processes, bits of the state are flipped
between steps, on one device of one process: in any array alike, or in any element alike. The exit
status is 1 unless every process names the array and the device each time. Many more steps without
a flip are run in one process of 4 devices, where a step does not wait for messages.

How long steps take with checks and without is measured in the same run, in alternation. What a
check reads on hardware that is not here is compiled: `halfstep.preflight(rest_check, ...)`.
"""

import argparse
import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import halfstep
from benchmarks._hardening import rest_text
from benchmarks._report import parser, report, write
from examples import _mesh, gpt_fsdp
from examples._text import Batches, python_library
from halfstep.reliability import RestError, rest_check
from tests.scale._processes import Group

MODULE = "benchmarks.rest"
DEVICES = 4
MODES = ("data-parallel", "fsdp")
RUNS = (("f16", "adamw"), ("f8", "flash"))
CASES = tuple(itertools.product(MODES, RUNS))
EVERY = (1, 10)
"""Steps between checks whose cost is measured."""
BLOCK, ROUNDS = 10, 3
"""Steps in a row with the same checks, and how often each number of checks has its block."""
TARGETS = ("h100", "v5e")


def flip(array: jax.Array, *, process: int, random: np.random.Generator) -> jax.Array:
    """The array with one bit changed in the part that one process has; all processes call it."""
    data = jax.random.key_data(array) if is_key(array) else array
    own = [np.array(shard.data) for shard in data.addressable_shards]
    raw = own[0].reshape(-1).view(np.uint8)
    # All processes draw the same number, and only one of them uses it. Booleans have one bit.
    bit = int(random.integers(8 * raw.size))
    bit = bit // 8 * 8 if own[0].dtype == bool else bit
    if jax.process_index() == process:
        raw[bit // 8] ^= 1 << bit % 8
    placed = [
        jax.device_put(part, shard.device)
        for part, shard in zip(own, data.addressable_shards, strict=True)
    ]
    made = jax.make_array_from_single_device_arrays(data.shape, data.sharding, placed)
    return (
        jax.random.wrap_key_data(made, impl=jax.random.key_impl(array)) if is_key(array) else made
    )


def is_key(array: jax.Array) -> bool:
    """Whether it holds keys of random numbers."""
    return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def plant(state: Any, digests: Any, random: np.random.Generator, number: int) -> str | None:
    """Flip one bit and check; what is wrong with the answer, or nothing."""
    flat, structure = jax.tree_util.tree_flatten_with_path(state)
    sizes = np.asarray([leaf.nbytes for _, leaf in flat], float)
    weights = (sizes > 0) if number % 2 else sizes
    at = int(random.choice(len(flat), p=weights / weights.sum()))
    process = int(random.integers(jax.process_count()))
    leaves = [leaf for _, leaf in flat]
    leaves[at] = flip(leaves[at], process=process, random=random)
    name = digests.names[at]
    try:
        rest_check(jax.tree.unflatten(structure, leaves), digests, step=number)
    except RestError as error:
        named = f": `{name}` on device "
        right = named in str(error) and f"of process {process}. Go back" in str(error)
        return None if right else f"flip {number} in {name} of process {process}: {error}"
    return f"flip {number} in {name} of process {process} was not found"


def checked_steps(
    run: Any, state: Any, batches: Any, *, steps: int, flips: int
) -> tuple[Any, dict[str, Any]]:
    """Steps with a check after each, and flips between them."""
    random, missed, digests = np.random.default_rng(0), [], rest_check(state)
    for number in range(1, steps + 1):
        # Raises if anything has changed, which ends the benchmark: a false alarm.
        rest_check(state, digests, step=number)
        _, state = run(state, next(batches))
        digests = rest_check(state)
        for planted in range((number - 1) * flips // steps, number * flips // steps):
            missed += [text] if (text := plant(state, digests, random, planted)) else []
    return state, {"steps": steps, "flips": flips, "missed": missed}


def seconds(run: Any, state: Any, batches: Any) -> tuple[Any, dict[str, float]]:
    """How much longer steps take with checks than without: medians of neighboring blocks."""
    found: dict[int, list[float]] = {every: [] for every in (0, *EVERY)}
    for _ in range(ROUNDS):
        for every, times in found.items():
            begin, digests = time.perf_counter(), None
            for number in range(BLOCK):
                if digests is not None:
                    rest_check(state, digests)
                _, state = run(state, next(batches))
                digests = rest_check(state) if every and number % every == 0 else None
            jax.block_until_ready(state)
            times.append(time.perf_counter() - begin)
    ratios = {
        str(every): statistics.median(a / b for a, b in zip(found[every], found[0], strict=True))
        for every in EVERY
    }
    return state, ratios


def work(argv: list[str]) -> None:
    """One of the processes."""
    options = argparse.ArgumentParser()
    for name in ("mode", "policy", "optimizer", "out", "coordinator"):
        options.add_argument(f"--{name}")
    for name, usual in {"steps": 0, "flips": 0, "processes": 1, "process": 0}.items():
        options.add_argument(f"--{name}", type=int, default=usual)
    given = options.parse_args(argv)
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    with _mesh.processes(given.coordinator, given.processes, given.process):
        mesh = _mesh.make_mesh(DEVICES if given.mode == "fsdp" else 1)
        config = gpt_fsdp.Config(
            policy=given.policy,
            optimizer=given.optimizer,
            steps=given.steps,
            batch=8,
            tokens=16,
            width=64,
            layers=1,
            heads=2,
        )
        text = python_library(100_000)
        batches = Batches(text, seed=0, length=17, batch=8, sharding=_mesh.rows(mesh))
        state = gpt_fsdp.initial_state(config, mesh, next(batches))
        run = gpt_fsdp.make_step(config, state)
        state, found = checked_steps(run, state, batches, steps=given.steps, flips=given.flips)
        if given.flips:
            state, found["ratios"] = seconds(run, state, batches)
        found["arrays"] = len(jax.tree.leaves(state))
        found["bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        out = pathlib.Path(given.out) / f"{jax.process_index()}.json"
        out.write_text(json.dumps(found))


def run_case(
    mode: str, policy: str, optimizer: str, *, processes: int, steps: int, flips: int
) -> dict[str, Any]:
    """One run on all devices; all processes have to say the same."""
    with tempfile.TemporaryDirectory() as name:
        argv = f"--mode {mode} --policy {policy} --optimizer {optimizer} --out {name}".split()
        argv += ["--steps", str(steps), "--flips", str(flips)]
        logs, devices = pathlib.Path(name), DEVICES // processes
        with Group(work, argv, processes, logs, devices=devices) as group:
            if any(code != 0 for code in group.wait(300 + steps)):
                raise AssertionError(group.said())
        files = [logs / f"{index}.json" for index in range(processes)]
        found = [json.loads(file.read_text()) for file in files]
    missed = [text for one in found for text in one["missed"]]
    about = {"mode": mode, "policy": policy, "optimizer": optimizer, "processes": processes}
    return {**about, **found[0], "missed": sorted(set(missed))}


def traffic(target: str) -> dict[str, Any]:
    """What a check reads, compared with the step, of the example at its own size on one device."""
    step, (state, text) = gpt_fsdp.plan_step()
    options = {"targets": target, "progress": False}
    (trained,) = halfstep.preflight(step, (state, text), donate_argnums=(0,), **options).entries
    (check,) = halfstep.preflight(rest_check, (state,), **options).entries
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return {
        "target": target,
        "state_bytes": size,
        "check_bytes": check.traffic_bytes,
        "step_bytes": trained.traffic_bytes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--steps", type=int, default=5000, help="steps without a flip (5000)")
    options.add_argument("--flips", type=int, default=500, help="flips in each run (500)")
    options.add_argument("--quick", action="store_true", help="few steps and flips")
    parsed = options.parse_args(argv)
    steps, flips = (40, 20) if parsed.quick else (parsed.steps, parsed.flips)
    kinds = ({"processes": DEVICES, "steps": 20, "flips": flips},)
    kinds += ({"processes": 1, "steps": steps, "flips": 0},)
    rows: list[dict[str, Any]] = []
    for kind, (mode, run) in tqdm(list(itertools.product(kinds, CASES)), unit="run"):
        rows.append(run_case(mode, *run, **kind))
        # Runs take long: one that is cut short leaves what it has found.
        write(report(MODULE, {"rows": rows, "traffic": []}, packages=("libtpu",)), parsed.json)
    results = {"rows": rows, "traffic": [traffic(target) for target in TARGETS]}
    print(rest_text(results), file=sys.stderr)
    write(report(MODULE, results, packages=("libtpu",)), parsed.json)
    return 1 if any(row["missed"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
