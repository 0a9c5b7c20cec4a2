"""Exchange short strings between the processes of one run."""

import jax
import numpy as np
from jax.experimental import multihost_utils

# Gathering needs the same shape on all processes, so every text has this much room, its length
# included. A second round, with more room, is only needed for the numbers of hundreds of steps.
_ROOM = 2048
_LENGTH = 8


def gather_texts(text: str) -> list[str]:
    """Return the text of each process, by the number of the process. All processes must call it."""
    if jax.process_count() == 1:
        return [text]
    said = text.encode()
    said = len(said).to_bytes(_LENGTH) + said
    rows = _gather_bytes(said, _ROOM)
    ends = [_LENGTH + int.from_bytes(row[:_LENGTH]) for row in rows]
    # All processes see all lengths, so all of them make the same decision here.
    if max(ends) > _ROOM:
        rows = _gather_bytes(said, max(ends))
    return [row[_LENGTH:end].decode() for row, end in zip(rows, ends, strict=True)]


def _gather_bytes(said: bytes, room: int) -> list[bytes]:
    """Return the first `room` bytes of each process, padded with zeros."""
    own = np.zeros(room, np.uint8)
    own[: len(said)] = np.frombuffer(said[:room], np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, room)
    return [bytes(row) for row in rows]


def agree(reason: str | None) -> str | None:
    """Return the first reason that any process has, the same on all; `None` if none has one."""
    # Every process has to make the same decision: a process that raises alone leaves the others
    # waiting in the next collective until the job is killed.
    for process, said in enumerate(gather_texts(reason or "")):
        if said:
            return said if jax.process_count() == 1 else f"{said} (process {process})"
    return None


def first_says(text: str) -> str:
    """Return the text of process 0."""
    return gather_texts(text)[0]


def wait_for_all(name: str) -> None:
    """Wait until all processes have called this function."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
