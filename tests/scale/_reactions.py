"""What happens to one of two processes, and how long until both have ended."""

import json
import pathlib
import signal
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from tests.scale import _worker
from tests.scale._processes import Group

LIMIT = 3
"""Of the watchdogs, in seconds."""
COORDINATOR = "SIGKILL, process 0"
"""Process 0 is the one that all others are connected with."""
SIGNALS: Mapping[str, tuple[signal.Signals, int]] = MappingProxyType(
    {
        "SIGKILL": (signal.SIGKILL, 1),
        COORDINATOR: (signal.SIGKILL, 0),
        "SIGSTOP": (signal.SIGSTOP, 1),
        "SIGTERM": (signal.SIGTERM, 1),
    }
)
"""What is sent from outside, and to which process."""
FAULTS = (*SIGNALS, "exception", "hang", "slow", "late")


def react(fault: str, out: pathlib.Path) -> dict[str, Any]:
    """Let something happen to one process in the middle of a run, and see how both end."""
    # A signal to stop is not a fault: nothing is to be cut short.
    limit = 60 if fault == "SIGTERM" else LIMIT
    # What is not sent a process does to itself, and that is process 1.
    number, victim = SIGNALS.get(fault, (None, 1))
    argv = ["loop", str(out), "--fault", fault, "--limit", str(limit)]
    with Group(_worker.main, argv, 2, out) as group:
        _reach(group, out)
        begin = time.monotonic()
        if number is not None:
            group.send(victim, number)
        if fault != "SIGSTOP":
            group.processes[victim].join(60)
        group.processes[1 - victim].join(60)
        took = time.monotonic() - begin
        codes = [process.exitcode for process in group.processes]
        said = [log.read_text(errors="replace") for log in group.logs]
    files = [out / f"loop-{index}.json" for index in range(2)]
    results = [json.loads(file.read_text()) for file in files if file.exists()]
    return {
        "fault": fault,
        "seconds": round(took, 2),
        "codes": codes,
        "said": said,
        "results": results,
    }


def _reach(group: Group, out: pathlib.Path) -> None:
    """Wait until both processes are in the middle of the run."""
    end = time.monotonic() + 300
    while not all((out / f"reached-{index}").exists() for index in range(2)):
        if time.monotonic() > end or group.any_ended():
            raise AssertionError(group.said())
        time.sleep(0.01)


def together(out: pathlib.Path) -> list[dict[str, Any]]:
    """Bad numbers, a flipped bit, arrays that differ and a damaged file: what each process saw."""
    with Group(_worker.main, ["together", str(out)], 2, out) as group:
        codes = group.wait(300)
        if codes != [0, 0]:
            raise AssertionError(group.said())
    return [json.loads((out / f"together-{index}.json").read_text()) for index in range(2)]
