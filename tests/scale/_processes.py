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
    main: Callable[[list[str]], Any], argv: list[str], log: str, settings: dict[str, Any]
) -> None:
    """What each process does: it has its own log, and settings of JAX that are its own."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # LLVM takes longer to optimize programs as small as these than it saves.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    import jax

    for name, value in settings.items():
        jax.config.update(name, value)
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
        cache: A folder for what is compiled, so that a second start need not.
    """

    def __init__(
        self,
        main: Callable[[list[str]], Any],
        argv: Sequence[str],
        count: int,
        logs: pathlib.Path,
        *,
        devices: int = 1,
        cache: pathlib.Path | None = None,
    ):
        logs.mkdir(parents=True, exist_ok=True)
        self.logs = [logs / f"process{index}.log" for index in range(count)]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([main.__module__])
        address = f"127.0.0.1:{free_port()}"
        settings = {
            "jax_num_cpu_devices": devices,
            "jax_compilation_cache_dir": None if cache is None else str(cache),
            "jax_persistent_cache_min_compile_time_secs": 0.0,
        }
        self.processes = []
        for index, log in enumerate(self.logs):
            place = ["--coordinator", address, "--processes", str(count), "--process", str(index)]
            args = (main, [*argv, *(place if count > 1 else ())], str(log), settings)
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
