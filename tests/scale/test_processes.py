"""Real processes: what happens to one of them, all of them know."""

import json
import pathlib
import signal
import time
from typing import Any

import pytest

from benchmarks._processes import Group
from tests.scale import _worker


def results(group: Group, out: pathlib.Path, what: str, seconds: float = 120) -> list[Any]:
    """What each process found; they must all end well."""
    codes = group.wait(seconds)
    assert codes == [0] * len(codes), group.said()
    files = [out / f"{what}-{index}.json" for index in range(len(codes))]
    return [json.loads(file.read_text()) for file in files]


def test_what_one_process_has_all_know(tmp_path: pathlib.Path):
    with Group(_worker.main, ["together", str(tmp_path)], 2, tmp_path) as group:
        first, second = results(group, tmp_path, "together")
    # Bad numbers in the batch of one: nobody steps, and everybody halves the scale.
    assert first["bad_numbers"] == second["bad_numbers"]
    for bad in ("nan", "inf", "70000.0"):
        assert not first["bad_numbers"][bad]["finite"]
        assert first["bad_numbers"][bad]["scale"] == 0.5
    assert first["bad_numbers"]["None"]["finite"]
    assert first["bad_numbers"]["None"]["scale"] == 1
    # A flipped bit after step 3, copies compared every 2 steps.
    assert first["flipped"] == second["flipped"]
    assert first["flipped"]["step"] == 4
    assert "copies differ after step 4: `params/w` on device" in first["flipped"]["error"]
    assert "of process 1 (data=1, fsdp=0)" in first["flipped"]["error"]
    # What each has for itself.
    assert first["ledger_of_each"] == second["ledger_of_each"]
    assert first["ledger_of_each"]["own"] == [0, 1, 2]
    assert "`['own']` is an array of each process's own, and differs" in str(first)


def reach(group: Group, out: pathlib.Path) -> None:
    """Wait until both processes are in the middle of the run."""
    end = time.monotonic() + 120
    while not all((out / f"five-{index}").exists() for index in range(2)):
        assert time.monotonic() < end, group.said()
        assert not group.any_ended(), group.said()
        time.sleep(0.01)


FAULTS = {
    "hang": "has not finished the step after 4 within 3 seconds and is ended",
    "exception": "RuntimeError: of process 1 alone",
    "SIGSTOP": "",
    "SIGKILL": "",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_all_end_within_the_limit(fault: str, tmp_path: pathlib.Path):
    argv = ["loop", str(tmp_path), "--fault", fault, "--limit", "3"]
    with Group(_worker.main, argv, 2, tmp_path) as group:
        reach(group, tmp_path)
        begin = time.monotonic()
        if fault.startswith("SIG"):
            group.send(1, getattr(signal, fault))
        ended = group.processes[0] if fault == "SIGSTOP" else group.processes[1]
        ended.join(10)
        group.processes[0].join(10)
        took = time.monotonic() - begin
        assert group.processes[0].exitcode not in (None, 0), group.said()
        assert fault == "SIGSTOP" or group.processes[1].exitcode not in (None, 0)
        # The limit, and as much again for a slow machine.
        assert took < 6
        assert FAULTS[fault] in group.logs[1].read_text()
        if fault == "hang":
            assert "in loop" in group.logs[1].read_text()


def test_a_signal_to_one_stops_all_after_the_same_step(tmp_path: pathlib.Path):
    with Group(_worker.main, ["loop", str(tmp_path)], 2, tmp_path) as group:
        reach(group, tmp_path)
        group.send(1, signal.SIGTERM)
        first, second = results(group, tmp_path, "loop", 60)
    assert first == second
    assert first["stopped"] >= 5


def manifest(out: pathlib.Path, step: int) -> Any:
    found = json.loads((out / "run" / str(step) / "about" / "manifest.json").read_text())
    return {name: found[name] for name in ("leaves", "static")}


def test_four_processes_two_and_one(tmp_path: pathlib.Path):
    for step, (processes, devices) in enumerate([(4, 1), (2, 1), (1, 4)], 1):
        fsdp = str(processes * devices)
        argv = ["reshard", str(tmp_path), "--fsdp", fsdp]
        with Group(_worker.main, argv, processes, tmp_path, devices=devices) as group:
            found = results(group, tmp_path, "reshard")
        assert found[0] == {"spec": "P(None, 'fsdp')", "devices": processes * devices}
        assert manifest(tmp_path, step) == manifest(tmp_path, 1)
    digests = [leaf["digest"] for leaf in manifest(tmp_path, 3)["leaves"].values()]
    assert len(set(digests)) > 8
