"""Stop all processes after the same step when a machine is preempted."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils

from halfstep._base import checked


class Preemption:
    """Tells all processes after which step to save and stop, once one of them gets a SIGTERM.

    With several processes, JAX's coordination service chooses the step: the signal may reach only
    one of them, and they need not be at the same step. With one process, it is the next step. Use
    this class in a `with` statement, in the main thread.

    Example:
        ```python
        import halfstep

        with halfstep.reliability.Preemption() as preemption:
            for step in range(1, 4):
                ...  # The step.
                if preemption.reached(step):
                    ...  # Save, wait for it, and leave.
                    break
        assert step == 3
        ```
    """

    @checked
    def __init__(self) -> None:
        self._noticed = threading.Event()
        self._before: Any = None
        # With several processes, JAX's coordination service has its own handler for SIGTERM. A
        # handler here would take the signal from it.
        self._is_alone = not jax.distributed.is_initialized()

    def __enter__(self) -> "Preemption":
        if self._is_alone:
            if threading.current_thread() is not threading.main_thread():
                raise RuntimeError(
                    "Preemption must be entered in the main thread, the only one in which Python "
                    f"handles signals; got {threading.current_thread().name!r}. Enter it there, "
                    "and pass it to the thread that trains: reached() may be called in any."
                )
            self._before = signal.signal(signal.SIGTERM, self._notice)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._is_alone:
            signal.signal(signal.SIGTERM, self._before)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self._noticed.set()

    def reached(self, step: int) -> bool:
        """Return whether this is the step to stop after. Call it on every process after every step.

        Args:
            step: The number of the step; the next step has the next number.
        """
        if self._is_alone:
            return self._noticed.is_set()
        return multihost_utils.reached_preemption_sync_point(step)
