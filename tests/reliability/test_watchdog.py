"""A process that hangs is ended within the limit and says where; others are left alone."""

import os
import signal
import subprocess
import sys
import time

import pytest

from halfstep.reliability import Preemption, Watchdog

HANGS = {
    "in Python": "import time\ndef stuck():\n    time.sleep(60)\n",
    # A call that never lets go of the interpreter: no Python thread runs any more.
    "holding the interpreter": ("import ctypes\ndef stuck():\n    ctypes.PyDLL(None).sleep(60)\n"),
}


@pytest.mark.parametrize("where", HANGS)
def test_a_hang_is_ended_with_its_stack(where: str):
    code = (
        f"{HANGS[where]}"
        "from halfstep.reliability import Watchdog\n"
        "with Watchdog(1.0, first=30.0) as watchdog:\n"
        "    print('begins', flush=True)\n"
        "    watchdog.tick(7)\n"
        "    stuck()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    begin = time.monotonic()
    _, said = process.communicate(timeout=30)
    assert 0.5 < time.monotonic() - begin < 10
    assert process.returncode == 1
    assert "in stuck" in said
    assert "Timeout (0:00:01)!" in said
    if where == "in Python":
        assert "process 0 (pid " in said
        assert "has not finished the step after 7 within 1 seconds and is ended" in said


def test_steps_in_time_are_left_alone():
    with Watchdog(0.5, first=5.0) as watchdog:
        for step in range(4):
            time.sleep(0.2)
            watchdog.tick(step)
    time.sleep(0.6)


def test_limits_are_seconds():
    with pytest.raises(ValueError, match="`limit` and `first` are seconds, more than 0; got 0 and"):
        Watchdog(0)


def test_a_signal_stops_one_process():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.reached(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.reached(2)
    assert signal.getsignal(signal.SIGTERM) is before
