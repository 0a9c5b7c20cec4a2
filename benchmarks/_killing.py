"""Runs of `examples.gpt_fsdp` whose processes are killed at random points and started again."""

import dataclasses
import json
import pathlib
import random
import time
from collections.abc import Sequence
from typing import Any

from examples import gpt_fsdp
from tests.scale._processes import Group

POLICIES = ("bf16", "f16", "f8", "flash")
MODES = ("dp", "fsdp")
STEPS, SAVE_EVERY = 24, 3
# The smallest model that has all parts. The loss scale of float16 is so high that steps are
# skipped, and grows so often that it is another one at each checkpoint.
SIZES = (
    f"--steps {STEPS} --save-every {SAVE_EVERY} --log-every 1 --eval-every 1000 --width 64 "
    "--layers 1 --heads 2 --tokens 16 --batch 8 --text 100000 --loss-scale 4194304 "
    "--growth-period 4 --learning-rate 0.02 --check-every 8"
)


@dataclasses.dataclass(frozen=True)
class Case:
    """How a run is spread, and in which precision it is."""

    mode: str
    policy: str
    processes: int

    def argv(self, out: pathlib.Path) -> list[str]:
        """The arguments of the example."""
        fsdp = self.processes if self.mode == "fsdp" else 1
        flash = self.policy == "flash"
        policy = "bf16" if flash else self.policy
        more = f"--policy {policy} --optimizer {'flash' if flash else 'adamw'} --fsdp {fsdp}"
        return [*SIZES.split(), *more.split(), "--out", str(out)]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A process that is killed: after a step, or while a checkpoint is being written."""

    rank: int
    kind: str
    step: int
    delay: float


def random_faults(count: int, processes: int, seed: int) -> list[Fault]:
    """Faults at random points of a run, of each rank in turn and of both kinds."""
    made, chosen = [], random.Random(seed)
    first = chosen.randrange(processes)
    for number in range(count):
        low, high = 1 + number * (STEPS - 3) // count, (number + 1) * (STEPS - 3) // count
        kind = ("step", "save")[(number + seed) % 2]
        delay = chosen.uniform(0.0, 0.25 if kind == "save" else 0.1)
        rank = (first + number) % processes
        made.append(Fault(rank, kind, chosen.randint(low, max(low, high)), delay))
    return made


def last_logged(out: pathlib.Path) -> int:
    """The last step that a run has logged, 0 if none."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def newest(out: pathlib.Path) -> int:
    """The newest complete checkpoint, 0 if none."""
    found = (out / "checkpoints").glob("*/about/files.*")
    return max((int(p.parts[-3]) for p in found if p.parts[-3].isdecimal()), default=0)


def _is_writing(out: pathlib.Path, after: int, since: float) -> bool:
    """Whether a checkpoint is being written, and not one that an earlier kill has left behind."""
    found = (out / "checkpoints").glob("*.orbax-checkpoint-tmp")
    steps = [int(path.name.split(".")[0]) for path in found if _is_new(path, since)]
    return any(step >= after for step in steps)


def _is_new(path: pathlib.Path, since: float) -> bool:
    try:
        return path.stat().st_mtime > since
    except FileNotFoundError:
        return False


def _group(case: Case, out: pathlib.Path) -> Group:
    cache = out.parent / "cache"
    return Group(gpt_fsdp.main, case.argv(out), case.processes, out / "logs", cache=cache)


def inject(case: Case, out: pathlib.Path, fault: Fault, limit: float = 300.0) -> dict[str, Any]:
    """Start a run, or go on with it, and kill one process; return what was seen."""
    with _group(case, out) as group:
        begin, end = time.time(), time.monotonic() + limit

        def is_there() -> bool:
            if fault.kind == "save":
                return _is_writing(out, fault.step, begin)
            # A run that goes on first writes the log anew, up to its checkpoint.
            return _is_new(out / "metrics.jsonl", begin) and last_logged(out) >= fault.step

        while not is_there():
            if group.any_ended() or time.monotonic() > end:
                raise AssertionError(f"{case}, {fault}: not reached\n{group.said()}")
            time.sleep(0.002)
        time.sleep(fault.delay)
        group.send(fault.rank)
        killed = time.monotonic()
        codes = group.wait(60.0)
        noticed = time.monotonic() - killed
        done, kept = last_logged(out), newest(out)
        return {
            "rank": fault.rank,
            "kind": fault.kind,
            "step": done,
            "checkpoint": kept,
            "steps_lost": done - kept,
            "was_writing": _is_writing(out, 0, begin),
            "others_ended_by_themselves": None not in codes,
            "seconds_to_end": round(noticed, 2),
        }


def finish(case: Case, out: pathlib.Path, limit: float = 300.0) -> dict[str, Any]:
    """Run to the end, and return all that a run leaves behind."""
    with _group(case, out) as group:
        codes = group.wait(limit)
        if codes != [0] * case.processes:
            raise AssertionError(f"{case}: exit codes {codes}\n{group.said()}")
    return result(out)


def result(out: pathlib.Path) -> dict[str, Any]:
    """Digests of every leaf, what is not a leaf, the place in the data, and every record."""
    about = out / "checkpoints" / str(STEPS) / "about"
    return {
        "manifest": json.loads((about / "manifest.json").read_text()),
        "data": {path.name: path.read_text() for path in sorted(about.glob("data-*"))},
        "records": (out / "metrics.jsonl").read_text(),
    }


def compare(case: Case, faults: Sequence[Fault], out: pathlib.Path) -> dict[str, Any]:
    """One run in peace, one with faults: do they end with the same bits?"""
    whole = finish(case, out / "whole")
    seen = [inject(case, out / "parts", fault) for fault in faults]
    parts = finish(case, out / "parts")
    return {
        **dataclasses.asdict(case),
        "faults": seen,
        "differs": sorted(name for name in whole if whole[name] != parts[name]),
        "skipped": json.loads(whole["records"].splitlines()[-1])["skipped"],
    }
