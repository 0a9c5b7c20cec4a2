"""Several real processes of one run on this machine, and what can happen to them.

They are forked from one that has imported everything and started nothing, so that a restart costs
what it costs a scheduler with warm machines, and not the import of JAX.
"""

import multiprocessing
import os
import pathlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _run(
    main: Callable[[list[str]], Any], argv: list[str], log: str, devices: int, flags: str
) -> None:
    """What each process does: it has its own log, and as many devices as it is given."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ["XLA_FLAGS"] = flags
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    main(argv)
    sys.stdout.flush()


class Group:
    """The processes of one run. Use it in a `with` statement: none is left behind.

    Args:
        main: What each of them calls, importable by name.
        argv: Its arguments; each process gets its place and the coordinator's address too.
        count: How many processes.
        logs: A folder for what they print.
        devices: How many devices each of them has.
        flags: Of XLA's. By default LLVM does not optimize, which takes longer than it saves here.
    """

    def __init__(
        self,
        main: Callable[[list[str]], Any],
        argv: Sequence[str],
        count: int,
        logs: pathlib.Path,
        *,
        devices: int = 1,
        flags: str = "--xla_backend_optimization_level=0",
    ):
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"process{index}.log" for index in range(count)]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([main.__module__])
        address = f"127.0.0.1:{free_port()}"
        self.processes = []
        for index, log in enumerate(self.logs):
            place = ["--coordinator", address, "--processes", str(count), "--process", str(index)]
            args = (main, [*argv, *(place if count > 1 else ())], str(log), devices, flags)
            self.processes.append(context.Process(target=_run, args=args, daemon=True))
        for process in self.processes:
            process.start()

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *error: Any) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def send(self, index: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one of them."""
        pid = self.processes[index].pid
        if pid is None:
            raise AssertionError("not started")
        os.kill(pid, number)

    def any_ended(self) -> bool:
        """Whether one has ended."""
        return any(not process.is_alive() for process in self.processes)

    def wait(self, seconds: float) -> list[int | None]:
        """The exit codes of all, `None` for those that have not ended by then."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def said(self) -> str:
        """The ends of their logs."""
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}"
            for log in self.logs
            if log.exists()
        )
