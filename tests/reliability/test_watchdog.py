"""A process that hangs is ended within the limit and says where; others are left alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
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
    assert process.returncode == -signal.SIGXCPU
    assert "in stuck" in said
    assert f"process 0 (pid {process.pid})" in said
    assert "has not finished the step after 7 within 1 seconds and is ended" in said


def test_steps_in_time_are_left_alone():
    with Watchdog(0.5, first=5.0) as watchdog:
        for step in range(4):
            time.sleep(0.2)
            watchdog.tick(step)
    time.sleep(0.6)


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), float("inf"), "soon", None, np.ones(2)])
def test_limits_are_seconds(limit: Any):
    with pytest.raises(ValueError, match="`limit` must be a number of seconds, more than 0; got"):
        Watchdog(limit)


def test_numbers_of_numpy_are_seconds():
    with Watchdog(np.float32(30), first=np.int64(60)) as watchdog:
        watchdog.tick(np.int64(3))


RUNS = """
import time
from halfstep.reliability import Watchdog
with Watchdog(1.0, first=60.0) as watchdog:
    watchdog.tick(0)
    print("begins", flush=True)
    {body}
print("ends", flush=True)
"""


def started(body: str) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", RUNS.format(body=body)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


def test_a_process_that_was_stopped_and_continued_is_left_alone():
    process = started("time.sleep(0.5)")
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=30)[0] == "ends\n"
    assert process.returncode == 0


def test_time_counts_again_after_a_stop():
    process = started("time.sleep(60)")
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGXCPU


# As the stack of a thread shows that compiles.
COMPILES = """
    code = compile("import time; time.sleep(3)", "site-packages/jax/_src/compiler.py", "exec")
    exec(code)
"""


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(COMPILES.strip(), id="compiling"),
        pytest.param('with watchdog.allow(60, "saving"):\n        time.sleep(3)', id="a phase"),
        pytest.param(
            "inner = Watchdog(50)\n    with inner: pass\n    time.sleep(0.2)", id="nested"
        ),
    ],
)
def test_what_may_take_longer_is_left_alone(body: str):
    process = started(body)
    assert process.communicate(timeout=30)[0] == "ends\n"
    assert process.returncode == 0


@pytest.mark.rows(1)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(COMPILES.strip() + "\n    time.sleep(60)", id="after compiling"),
        pytest.param(
            'with watchdog.allow(60, "saving"):\n        pass\n    time.sleep(60)',
            id="after a phase",
        ),
        pytest.param(
            'with watchdog.allow(1, "saving"):\n        time.sleep(60)',
            id="in a phase",
            marks=pytest.mark.slow,
        ),
        pytest.param("inner = Watchdog(50)\n    with inner: pass\n    time.sleep(60)", id="nested"),
        pytest.param("inner = Watchdog(50)\n    with inner: time.sleep(60)", id="inside"),
    ],
)
def test_a_hang_is_ended_all_the_same(body: str):
    process = started(body)
    process.communicate(timeout=40)
    assert process.returncode == -signal.SIGXCPU


def test_timers_of_others_are_left_alone():
    code = (
        "import faulthandler, time\n"
        "from halfstep.reliability import Watchdog\n"
        "faulthandler.dump_traceback_later(1.0, exit=True)\n"
        "with Watchdog(50) as watchdog:\n"
        "    watchdog.tick(0)\n"
        "time.sleep(60)\n"
    )
    # The user's own timer ends it, as if there had been no watchdog.
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "Timeout (0:00:01)!" in done.stderr


def test_nothing_is_left_behind():
    watchdog = Watchdog(50)
    with watchdog:
        process = watchdog._process
        assert process is not None
        assert process.poll() is None
    assert process.returncode == 0


def test_signals_are_for_the_main_thread():
    said: list[str] = []

    def enter() -> None:
        try:
            with Preemption():
                pass
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=enter, name="trainer")
    thread.start()
    thread.join()
    assert "must be entered in the main thread" in said[0]
    assert "got 'trainer'" in said[0]


def test_a_signal_stops_one_process():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.reached(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.reached(2)
    assert signal.getsignal(signal.SIGTERM) is before
