"""Let one run at a time write to a folder of checkpoints."""

import contextlib
import datetime
import json
import os
import pathlib
import platform
import weakref
from typing import Any

from halfstep._base import is_in_file_system

try:
    import fcntl
except ImportError:  # Not on Windows, where JAX has no accelerators.
    fcntl = None

NAME = ".halfstep-writer"
_MOST = 4096


class WriterLock:
    """The right to write to a folder, held until it is released or the process ends.

    The lock is the kernel's (`flock`), not the file: a process that is killed has released it, so
    that nothing is left for a person to clean up. The content of the file is only for the message
    that another writer gets. Folders that are not in a file system, such as those in a bucket, and
    file systems without locks have no such lock: a second writer is not noticed there.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._path = pathlib.Path(folder) / NAME
        self._has_locks = fcntl is not None and is_in_file_system(self._path)
        self._file: int | None = None
        self._close: Any = None

    def acquire(self) -> str | None:
        """Take the lock, or return who holds it if another writer does."""
        if self._file is not None or fcntl is None or not self._has_locks:
            return None
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self._path, flags, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _described(os.read(file, _MOST))
            os.close(file)
            return holder
        except OSError:
            # This file system has no locks.
            os.close(file)
            return None
        self._file, self._close = file, weakref.finalize(self, os.close, file)
        # A forked worker would otherwise hold the lock of a run that has died.
        own = weakref.WeakMethod(self._leave)
        os.register_at_fork(after_in_child=lambda: (method := own()) and method())
        about = {
            "host": platform.node(),
            "pid": os.getpid(),
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(about).encode(), 0)
        return None

    def release(self) -> None:
        """Give the lock back."""
        if self._file is None:
            return
        # The file stays: deleting it would take it away from a writer that waits at this moment.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
        self._leave()

    def _leave(self) -> None:
        if self._file is not None:
            self._close()
            self._file = None


def _described(said: bytes) -> str:
    """Describe who holds a lock, from the content of its file."""
    try:
        about = json.loads(said)
        host, pid, since = str(about["host"]), int(about["pid"]), str(about["since"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
    if (host, pid) == (platform.node(), os.getpid()):
        return f"another Checkpoints of this process, since {since}"
    return f"process {pid} on {host}, since {since}"
