"""Watch another process from outside.

`Watchdog` starts this script, which imports only Python's standard library. It reads lines of JSON
from its standard input: `{"seconds": 300, "what": "the step after 7"}` sets how long the watched
process may take from now on. When this time has passed, the script writes which process hangs, and
sends a signal on which `faulthandler` writes all stacks. The script ends when its input ends.

Time counts only while both processes can run. When a laptop slept, a job was stopped (SIGSTOP) and
continued, or a machine swapped, the clock has gone on although nothing hangs. Time is therefore
added up in small pieces. A piece that took far longer than intended is not counted in full, and a
piece in which the watched process was stopped is not counted at all.
"""

import json
import os
import select
import signal
import sys
import time


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal or a debugger; not known everywhere."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may contain spaces.
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def watch(pid: int, out: int, number: int, name: str, grace: float) -> None:
    """Watch until the input ends or the process hangs."""
    waiting, seconds, what, spent = b"", float("inf"), "", 0.0
    last = time.monotonic()
    while True:
        pause = min(0.25, seconds / 8)
        ready, _, _ = select.select([0], [], [], pause)
        now = time.monotonic()
        spent += 0.0 if is_stopped(pid) else min(now - last, 2 * pause)
        last = now
        if os.getppid() != pid:
            return
        if ready:
            read = os.read(0, 65536)
            if not read:
                return
            *lines, waiting = (waiting + read).split(b"\n")
            for line in lines:
                said = json.loads(line)
                spent = 0.0 if said.get("anew", True) else spent
                seconds, what = said["seconds"], said["what"]
            continue
        if spent > seconds:
            text = (
                f"halfstep.reliability.Watchdog: {name} has not finished {what} within "
                f"{seconds:g} seconds and is ended. The stacks of its threads:\n"
            )
            os.write(out, text.encode())
            os.kill(pid, number)
            end = now + grace
            while os.getppid() == pid and time.monotonic() < end:
                time.sleep(0.05)
            # The process is still there: something blocks the signal.
            if os.getppid() == pid:
                os.kill(pid, signal.SIGKILL)
            return


if __name__ == "__main__":
    # Control-C in a terminal must not end this script together with the process that it watches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    watch(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
