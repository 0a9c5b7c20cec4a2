"""Real processes: what happens to one of them, all of them know."""

import json
import pathlib
from typing import Any

import pytest

from tests.scale import _reactions, _worker
from tests.scale._processes import Group


def results(group: Group, out: pathlib.Path, what: str, seconds: float = 120) -> list[Any]:
    """What each process found; they must all end well."""
    codes = group.wait(seconds)
    assert codes == [0] * len(codes), group.said()
    files = [out / f"{what}-{index}.json" for index in range(len(codes))]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
def test_what_one_process_has_all_know(tmp_path: pathlib.Path):
    first, second = _reactions.together(tmp_path)
    # Bad numbers in the batch of one: nobody steps, and everybody halves the scale.
    assert first["bad_numbers"] == second["bad_numbers"]
    for bad in ("nan", "inf", "70000.0"):
        assert not first["bad_numbers"][bad]["finite"]
        assert first["bad_numbers"][bad]["scale"] == 0.5
    assert first["bad_numbers"]["None"]["finite"]
    assert first["bad_numbers"]["None"]["scale"] == 1
    # Their logs are the same, bit by bit, and say what the verdict says.
    assert first["recorded"] == second["recorded"]
    assert first["recorded"]["verdicts"] == [True, False]
    assert first["recorded"]["step"] == 1
    assert first["recorded"]["found"].startswith("NaN in the argument x, f32[2,4]")
    # A flipped bit after step 3, copies compared every 2 steps.
    assert first["flipped"] == second["flipped"]
    assert first["flipped"]["step"] == 4
    assert "copies differ after step 4: `params/w` on device" in first["flipped"]["error"]
    assert "of process 1 (data=1, fsdp=0)" in first["flipped"]["error"]
    # What each has for itself.
    assert first["ledger_of_each"] == second["ledger_of_each"]
    assert first["ledger_of_each"]["own"] == [0, 1, 2]
    # A file that only the second process reads.
    assert first["damaged"]["step"] == second["damaged"]["step"] == 1
    assert "step 2 in" in first["damaged"]["said"][0]
    assert "is not what was written (process 1)" in first["damaged"]["said"][0]
    assert second["damaged"]["said"] == []
    assert "`['own']` is an array of each process's own, and differs" in str(first)
    # A package that only the second process lacks.
    assert first["package_missing"] == second["package_missing"]
    assert "the package `blake3` is not installed" in first["package_missing"]
    assert "(process 1)" in first["package_missing"]


SAYS = {
    "SIGKILL": "",
    _reactions.COORDINATOR: "",
    "exception": "RuntimeError: of process 1 alone",
    "hang": "has not finished the step after 4 within 3 seconds and is ended",
    "SIGSTOP": "",
}


@pytest.mark.rows(1)
@pytest.mark.parametrize("fault", SAYS)
def test_all_end_within_the_limit(fault: str, tmp_path: pathlib.Path):
    found = _reactions.react(fault, tmp_path)
    first, second = found["codes"]
    assert first not in (None, 0)
    assert second not in (None, 0) or fault == "SIGSTOP"
    # The limit, and as much again for a slow machine.
    assert found["seconds"] < 2 * _reactions.LIMIT
    assert SAYS[fault] in found["said"][1]
    if fault == "hang":
        assert "in loop" in found["said"][1]


@pytest.mark.rows(1)
@pytest.mark.parametrize("fault", ["slow", "late"])
def test_all_wait_for_one_that_is_slow(fault: str, tmp_path: pathlib.Path):
    found = _reactions.react(fault, tmp_path)
    assert found["codes"] == [0, 0], found["said"]
    first, second = found["results"]
    assert first == second
    assert first["stopped"] == _worker.LAST
    if fault == "slow":
        # Longer in all than the limit, which is for one step.
        assert found["seconds"] > _reactions.LIMIT


def test_a_signal_to_one_stops_all_after_the_same_step(tmp_path: pathlib.Path):
    found = _reactions.react("SIGTERM", tmp_path)
    assert found["codes"] == [0, 0], found["said"]
    first, second = found["results"]
    assert first == second
    assert first["stopped"] >= 5


@pytest.mark.slow
@pytest.mark.parametrize("steps", [12, pytest.param(5_000, marks=pytest.mark.slow)])
def test_four_processes_agree_among_many_steps(steps: int, tmp_path: pathlib.Path):
    argv = ["many", str(tmp_path), "--steps", str(steps)]
    with Group(_worker.main, argv, 4, tmp_path) as group:
        found = results(group, tmp_path, "many", seconds=60 + steps)
    assert found == [{"count": steps, "latest": steps, "restored": steps - 1}] * 4


def manifest(out: pathlib.Path, step: int) -> Any:
    found = json.loads((out / "run" / str(step) / "about" / "manifest.json").read_text())
    return {name: found[name] for name in ("leaves", "static")}


@pytest.mark.slow
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
