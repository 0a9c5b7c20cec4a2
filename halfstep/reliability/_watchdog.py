"""A process that hangs ends itself, and says where it hung."""

import faulthandler
import os
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

import jax


class Watchdog:
    """Ends this process if a step takes too long, after writing the stacks of all its threads.

    A process that hangs still answers the coordinator: that is another thread. So the others wait
    for it without end. With a watchdog it is gone, they learn of it as of any other loss, and a
    scheduler can start all of them again. The timer is `faulthandler`'s and runs in C: it needs
    neither the interpreter nor a lock that the hanging thread may hold. There is one in a process.

    Args:
        limit: In seconds, from one `tick` to the next.
        first: For the first one, which compiles; ten times the limit if it is not given.
        file: Where to write: a file of the operating system, such as standard error.

    Example:
        ```python
        import halfstep

        with halfstep.reliability.Watchdog(limit=300) as watchdog:
            for step in range(10):
                ...  # The step, and reading what it returned.
                watchdog.tick(step)
        ```
    """

    def __init__(
        self, limit: float | int, *, first: float | int | None = None, file: TextIO | None = None
    ):
        self._limit = limit
        self._first = 10 * limit if first is None else first
        if self._limit <= 0 or self._first <= 0:
            raise ValueError(
                f"`limit` and `first` are seconds, more than 0; got {limit} and {self._first}."
            )
        self._file = _descriptor(sys.stderr if file is None else file)
        self._ended = threading.Event()
        self._last: int | None = None
        self._deadline = 0.0
        self._allowed = 0.0
        self._process = 0

    def __enter__(self) -> "Watchdog":
        self._process = jax.process_index()
        self._start(self._first)
        threading.Thread(target=self._watch, name="halfstep-watchdog", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()

    def tick(self, step: int | None = None) -> None:
        """Say that a step is done. The time begins anew.

        Args:
            step: Its number, for the message.
        """
        self._last = step
        self._start(self._limit)

    def _start(self, seconds: float | int) -> None:
        self._allowed, self._deadline = seconds, time.monotonic() + seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def _watch(self) -> None:
        """Say who hangs, right before the end. If nobody can, the stacks come without it."""
        # `faulthandler` ends the process without Python, which alone knows the step that hangs. So
        # this thread wakes up shortly before; if the hanging one holds the interpreter, it cannot.
        pause = min(0.25, self._limit / 8)
        while not self._ended.wait(pause):
            if time.monotonic() < self._deadline - 1.5 * pause:
                continue
            after = "the first step" if self._last is None else f"the step after {self._last}"
            text = (
                f"halfstep.reliability.Watchdog: process {self._process} (pid {os.getpid()}) "
                f"has not finished {after} within {self._allowed:g} seconds and is ended. The "
                "stacks of its threads:\n"
            )
            os.write(self._file, text.encode())
            return


def _descriptor(file: TextIO) -> int:
    try:
        return file.fileno()
    except (AttributeError, OSError, ValueError):
        # A notebook or a test captures standard error in an object without a descriptor. What is
        # written to 2 then still reaches the log of the process.
        return 2
