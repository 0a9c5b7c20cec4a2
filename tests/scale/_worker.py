"""What processes do to which something happens: `main(["what", "out"])`, a JSON of results each."""

import argparse
import contextlib
import json
import os
import pathlib
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import halfstep
from halfstep import debug, optim
from halfstep.integrations._orbax import _verification
from halfstep.integrations.orbax import CheckpointError, Checkpoints
from halfstep.reliability import Preemption, ReplicaError, Watchdog, replica_check

SLOW = 0.5
"""The share of the limit that each step of a slow process takes, from step `FIRST` on."""
LATE = 5.0
"""Seconds that a process comes late."""
FIRST = 5
"""The step after which something happens to a process."""
LAST = 8
"""The last step of a run that nothing ends."""
OPTIMIZER = optax.sgd(0.1)
FLASH = optim.flash_adamw(1e-3, min_size=64)


def loss(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params["w"]) ** 2)


@jax.jit
def step(state: Any, x: Any) -> Any:
    value, scaling, finite, grads = halfstep.filter_value_and_grad(
        loss, state["scaling"], policy="f16"
    )(state["params"], x)
    params, optimizer = halfstep.optimizer_update(
        state["params"], OPTIMIZER, state["optimizer"], grads, finite
    )
    ledger = state["ledger"].record(finite)
    new = {"params": params, "optimizer": optimizer, "scaling": scaling, "ledger": ledger}
    return new, finite.finite, value


def start(mesh: Mesh) -> Any:
    params = {"w": jnp.full((4, 8), 0.5)}
    state = {
        "params": params,
        "optimizer": OPTIMIZER.init(params),
        "scaling": halfstep.DynamicLossScaling(2**8),
        "ledger": halfstep.Ledger(),
    }
    return jax.device_put(state, NamedSharding(mesh, P()))


def batch(mesh: Mesh, bad: float | None = None) -> jax.Array:
    """A row for each device; the last one's may have a bad number."""
    rows = np.ones((jax.device_count(), 4), np.float32)
    if bad is not None:
        rows[-1, 0] = bad
    sharding = NamedSharding(mesh, P(("data", "fsdp")))
    return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])


def bits(state: Any) -> str:
    copies = [np.asarray(leaf.addressable_data(0)) for leaf in jax.tree.leaves(state)]
    return b"".join(copy.tobytes() for copy in copies).hex()


def bad_numbers(mesh: Mesh, out: pathlib.Path) -> Any:
    """NaN, infinity and what float16 cannot hold, in the batch of one process."""
    found, state = {}, start(mesh)
    for bad in (np.nan, np.inf, 70000.0, None):
        before = float(state["scaling"].loss_scaling)
        state, finite, _ = step(state, batch(mesh, bad))
        after = float(state["scaling"].loss_scaling)
        found[str(bad)] = {"finite": bool(finite), "scale": after / before, "bits": bits(state)}
    return found


def flipped(mesh: Mesh, out: pathlib.Path) -> Any:
    """One bit of a mantissa, on one process, after step 3; copies are compared every 2 steps."""
    state = start(mesh)
    for number in range(1, 7):
        state, _, _ = step(state, batch(mesh))
        if number == 3:
            w = state["params"]["w"]
            copy = np.array(w.addressable_data(0))
            if jax.process_index() == 1:
                copy.view(np.uint32)[0, 0] ^= 1
            own = [jax.device_put(copy, jax.local_devices()[0])]
            made = jax.make_array_from_single_device_arrays(w.shape, w.sharding, own)
            state["params"]["w"] = made
        if number % 2 == 0:
            try:
                replica_check(state, step=number)
            except ReplicaError as error:
                return {"step": number, "error": str(error)}
    return None


def ledger_of_each(mesh: Mesh, out: pathlib.Path) -> Any:
    """An array that each process has for itself is saved if it is the same, and else named."""
    with Checkpoints(out / "own") as checkpoints:
        checkpoints.save(
            1, {"w": start(mesh)["params"]["w"], "own": np.arange(3), "n": jnp.ones(2)}
        )
        checkpoints.wait()
        like = {"w": start(mesh)["params"]["w"], "own": np.zeros(3, int), "n": jnp.zeros(2)}
        step, got = checkpoints.restore(like)
        try:
            checkpoints.save(2, {"own": np.full(3, jax.process_index())})
        except ValueError as error:
            return {"step": step, "own": got["own"].tolist(), "error": str(error)}
    return None


def damaged(mesh: Mesh, out: pathlib.Path) -> Any:
    """A file that one of the processes finds damaged: all take the step before."""
    like = {"w": start(mesh)["params"]["w"]}
    with Checkpoints(out / "damaged") as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, like)
        checkpoints.wait()
        if jax.process_index() == 0:
            # The second of the files that are listed: the second process reads it.
            listed = (out / "damaged" / "2" / "about" / "files.blake3").read_text().splitlines()
            path = out / "damaged" / "2" / listed[1].split("  ")[1]
            path.write_bytes(b"?" + path.read_bytes()[1:])
        multihost_utils.sync_global_devices("damaged")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            step, _ = checkpoints.restore(like)
    return {"step": step, "said": [str(warning.message) for warning in said]}


def package_missing(mesh: Mesh, out: pathlib.Path) -> Any:
    """A host without the package that hashed the files: all processes say so, and none waits."""
    like = {"w": start(mesh)["params"]["w"]}
    with Checkpoints(out / "missing") as checkpoints:
        checkpoints.save(1, like)
        checkpoints.wait()
        both = _verification.HASHINGS
        if jax.process_index() == 1:
            _verification.HASHINGS = tuple(one for one in both if one.name != "blake3")
        try:
            checkpoints.restore(like)
        except CheckpointError as error:
            return str(error)
        finally:
            _verification.HASHINGS = both
    return None


def recorded(mesh: Mesh, out: pathlib.Path) -> Any:
    """A recorded step, of which the second has a bad number in the batch of one process."""
    recorder = debug.record(step)
    run, state = jax.jit(recorder), start(mesh)
    log = recorder.init(state, batch(mesh))
    verdicts = []
    for bad in (None, np.nan):
        log, (state, finite, _) = run(log, state, batch(mesh, bad))
        verdicts.append(bool(finite))
    report = log.report()
    found = None if report.found is None else str(report.found)
    return {"verdicts": verdicts, "bits": bits(log), "found": found, "step": report.step}


def many(mesh: Mesh, out: pathlib.Path, steps: int) -> Any:
    """So many steps that a list of them is long, the last of which is damaged."""
    like = {"w": start(mesh)["params"]["w"]}
    with Checkpoints(out / "many", keep=steps) as checkpoints:
        for number in range(1, steps + 1):
            checkpoints.save(number, like)
        checkpoints.wait()
        listed = checkpoints.steps()
        if jax.process_index() == 0:
            (out / "many" / str(steps) / "about" / "manifest.json").write_text("{}")
        multihost_utils.sync_global_devices("damaged")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            last, _ = checkpoints.restore(like)
    return {"count": len(listed), "latest": listed[-1], "restored": last}


def together(mesh: Mesh, out: pathlib.Path) -> Any:
    """All of the above, for one start of the processes."""
    parts = (bad_numbers, recorded, flipped, ledger_of_each, damaged, package_missing)
    return {f.__name__: f(mesh, out) for f in parts}


def loop(mesh: Mesh, out: pathlib.Path, fault: str, limit: float) -> Any:
    """Steps until something happens to process 1."""
    state = start(mesh)
    for _ in range(2):
        # The second compiles once more, for arrays that the first has made. On a busy machine that
        # takes longer than the limit, which is for steps that only run.
        state, _, _ = step(state, batch(mesh))
    with Watchdog(limit, first=60.0) as watchdog, Preemption() as preemption:
        for number in range(1, 100_000):
            state, finite, _ = step(state, batch(mesh))
            assert bool(finite)
            if number >= FIRST and fault == "slow" and jax.process_index() == 1:
                # Longer than any other step, and shorter than the limit.
                time.sleep(SLOW * limit)
            if number == FIRST:
                (out / f"reached-{jax.process_index()}").touch()
                if jax.process_index() == 1 and fault == "hang":
                    time.sleep(600)
                if jax.process_index() == 1 and fault == "exception":
                    raise RuntimeError("of process 1 alone")
            if number == LAST and fault in ("slow", "late"):
                return {"stopped": number, "bits": bits(state)}
            watchdog.tick(number)
            if preemption.reached(number):
                return {"stopped": number, "bits": bits(state)}
    return None


def reshard(mesh: Mesh, out: pathlib.Path) -> Any:
    """Go on with whatever mesh wrote the last step, and write the next."""

    def make(key: Any) -> Any:
        params, state = FLASH.prepare({"w": jax.random.normal(key, (16, 32)), "b": jnp.ones(3)})
        scaling = halfstep.DynamicLossScaling(2**5)
        ledger = halfstep.Ledger().record(False)
        return {"params": params, "flash": state, "scaling": scaling, "ledger": ledger, "key": key}

    key = jax.random.key(0)
    shapes = jax.eval_shape(make, key)
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=NamedSharding(mesh, P(None, "fsdp") if leaf.ndim == 2 else P()),
        ),
        shapes["params"],
    )
    where = {
        **jax.tree.map(lambda _: NamedSharding(mesh, P()), shapes),
        "params": jax.tree.map(lambda leaf: leaf.sharding, params),
        "flash": optim.state_shardings(shapes["flash"], params),
    }
    made = jax.jit(make, out_shardings=where)
    with Checkpoints(out / "run", keep=9) as checkpoints:
        last, state = checkpoints.latest() or 0, made(key)
        if last:
            like = jax.tree.map(
                lambda leaf, s: jax.device_put(leaf, s), made(jax.random.key(1)), where
            )
            last, state = checkpoints.restore(like)
        checkpoints.save(last + 1, state)
    return {"spec": str(state["params"]["w"].sharding.spec), "devices": jax.device_count()}


@contextlib.contextmanager
def connected(coordinator: str | None, count: int, index: int) -> Iterator[None]:
    """Be one of several processes, or the only one if there is no coordinator."""
    if coordinator is None:
        yield
        return
    jax.distributed.initialize(
        coordinator,
        count,
        index,
        coordinator_bind_address=coordinator if index == 0 else None,
        cluster_detection_method="deactivate",
        initialization_timeout=60,
        heartbeat_timeout_seconds=20,
    )
    try:
        yield
    except BaseException:
        # The others learn of it at once, while a regular end would wait for them.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    jax.distributed.shutdown()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--fault", default="")
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--fsdp", type=int, default=1)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    options = parser.parse_args(argv)
    if options.fault == "late" and options.process == 1:
        # A machine that boots longer than the others.
        time.sleep(LATE)
    with connected(options.coordinator, options.processes, options.process):
        sizes = (jax.device_count() // options.fsdp, options.fsdp)
        mesh = jax.make_mesh(sizes, ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
        more = {"loop": (options.fault, options.limit), "many": (options.steps,)}
        found = globals()[options.what](mesh, options.out, *more.get(options.what, ()))
        (options.out / f"{options.what}-{jax.process_index()}.json").write_text(json.dumps(found))
