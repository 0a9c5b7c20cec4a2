"""End a process that hangs, and write where it hung."""

import contextlib
import faulthandler
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from types import TracebackType
from typing import Any, SupportsFloat, SupportsInt, TextIO

import jax

from halfstep._base import checked, is_compiling

_SCRIPT = pathlib.Path(__file__).with_name("_watchdog_process.py")
# The signal "CPU time limit exceeded", which nothing else sends to a training job. A scheduler can
# thus tell a hang from an error (1), from XLA's own aborts (SIGABRT) and from running out of memory
# (SIGKILL).
_SIGNAL = getattr(signal, "SIGXCPU", signal.SIGTERM)
_GRACE = 10.0


class Watchdog:
    """Ends this process if a step takes too long, after writing the stacks of all its threads.

    A process that hangs still answers the coordinator from another thread, so the other processes
    wait for it forever. A watchdog ends the process: the others then learn of the loss as of any
    other, and a scheduler can restart all of them. A small separate process keeps the time, so that
    a thread that holds the interpreter does not stop the watchdog.

    Only time in which the process could run counts. A process that was stopped and continued, or
    whose laptop slept, is not ended. Compiling counts against `first`, at any step. The exit status
    is that of the signal SIGXCPU: -24 for Python's `subprocess`, 152 in a shell. Watchdogs may be
    nested, and used in any thread.

    Args:
        limit: The limit in seconds from one `tick` to the next.
        first: The limit for the first step, and whenever a program is compiled; ten times `limit`
            by default.
        file: The file to write to: a file of the operating system, such as standard error.

    Example:
        ```python
        import halfstep

        with halfstep.reliability.Watchdog(limit=300) as watchdog:
            for step in range(10):
                ...  # The step, and reading what it returned.
                watchdog.tick(step)
                with watchdog.allow(1800, "evaluation"):
                    ...  # What may take longer.
        ```
    """

    @checked
    def __init__(
        self,
        limit: SupportsFloat,
        *,
        first: SupportsFloat | None = None,
        file: TextIO | None = None,
    ):
        self._limit = _seconds(limit, "limit")
        self._first = 10 * self._limit if first is None else _seconds(first, "first")
        self._file = _descriptor(sys.stderr if file is None else file)
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._now: dict[str, Any] = {}

    def __enter__(self) -> "Watchdog":
        name = f"process {jax.process_index()} (pid {os.getpid()})"
        # A handler in C writes the stacks. It needs neither the interpreter nor any of its locks.
        # The previous handler is called afterwards: the default one, which ends the process.
        faulthandler.register(_SIGNAL, file=self._file, all_threads=True, chain=True)
        words = (os.getpid(), self._file, int(_SIGNAL), name, _GRACE)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT), *map(str, words)],
            stdin=subprocess.PIPE,
            pass_fds=(self._file,),
        )
        self._say(self._first, "the first step")
        # The thread that enters is the one that trains.
        args = (threading.get_ident(),)
        threading.Thread(
            target=self._notice_compiling, args=args, name="halfstep-watchdog", daemon=True
        ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._process is not None and self._process.stdin is not None:
            with self._lock, contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()

    def tick(self, step: SupportsInt | None = None) -> None:
        """Report that a step is done, and restart the time.

        Args:
            step: The number of the step, for the message.
        """
        self._say(self._limit, "the next step" if step is None else f"the step after {step}")

    @contextlib.contextmanager
    def allow(self, seconds: SupportsFloat, what: str) -> Generator[None]:
        """Allow a phase that takes longer than a step: an evaluation, a checkpoint, a download.

        Args:
            seconds: How long the phase may take.
            what: The name of the phase, for the message.
        """
        before = self._now
        self._say(_seconds(seconds, "seconds"), what)
        try:
            yield
        finally:
            # The time for the interrupted phase begins anew.
            self._say(before.get("seconds", self._limit), before.get("what", "the next step"))

    def _say(self, seconds: float, what: str, *, anew: bool = True) -> None:
        with self._lock:
            if anew:
                self._now = {"seconds": seconds, "what": what}
            process = self._process
            if process is None or process.stdin is None or process.stdin.closed:
                return
            line = json.dumps({"seconds": seconds, "what": what, "anew": anew})
            # If the watching process is gone, training continues without it.
            with contextlib.suppress(OSError):
                process.stdin.write(f"{line}\n".encode())
                process.stdin.flush()

    def _notice_compiling(self, thread: int) -> None:
        """Allow more time while a program is compiled, which may happen at any step.

        JAX reports a compilation only afterwards. Whether it is compiling shows in the stack of the
        thread that trains.
        """
        was_compiling = False
        while not self._ended.wait(min(1.0, self._limit / 4)):
            now = is_compiling(thread)
            if now and not was_compiling:
                longer = max(self._first, self._now["seconds"])
                self._say(longer, f"compiling for {self._now['what']}", anew=False)
            elif was_compiling and not now:
                self._say(self._now["seconds"], self._now["what"])
            was_compiling = now


def _seconds(given: Any, name: str) -> float:
    try:
        seconds = float(given)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"`{name}` must be a number of seconds, more than 0; got {given!r}.")
    return seconds


def _descriptor(file: TextIO) -> int:
    try:
        return file.fileno()
    except (AttributeError, OSError, ValueError):
        # A notebook or a test captures standard error in an object without a descriptor. Output to
        # descriptor 2 then still reaches the log of the process.
        return 2
