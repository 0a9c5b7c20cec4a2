"""Let the processes of one run tell each other short texts."""

import jax
import numpy as np
from jax.experimental import multihost_utils

# Gathering needs the same shape on all processes, so that every text has this much room, its length
# included. A second round, with more room, is only needed for the numbers of hundreds of steps.
_ROOM = 2048
_LENGTH = 8


def gather_texts(text: str) -> list[str]:
    """Return what each process says, by its number. All of them call it."""
    if jax.process_count() == 1:
        return [text]
    said = text.encode()
    said = len(said).to_bytes(_LENGTH) + said
    rows = _gather_bytes(said, _ROOM)
    ends = [_LENGTH + int.from_bytes(row[:_LENGTH]) for row in rows]
    # All processes see all lengths, so that all of them come to the same decision here.
    if max(ends) > _ROOM:
        rows = _gather_bytes(said, max(ends))
    return [row[_LENGTH:end].decode() for row, end in zip(rows, ends, strict=True)]


def _gather_bytes(said: bytes, room: int) -> list[bytes]:
    """Return the first bytes of what each process says, as many as there is room for."""
    own = np.zeros(room, np.uint8)
    own[: len(said)] = np.frombuffer(said[:room], np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(own)).reshape(-1, room)
    return [bytes(row) for row in rows]


def agree(reason: str | None) -> str | None:
    """The first reason any process has, the same on all; `None` if none has one."""
    # Every process has to come to the same decision: one that raises alone leaves the others
    # waiting in the next collective until the job is killed.
    for process, said in enumerate(gather_texts(reason or "")):
        if said:
            return said if jax.process_count() == 1 else f"{said} (process {process})"
    return None


def first_says(text: str) -> str:
    """Return what process 0 says."""
    return gather_texts(text)[0]


def wait_for_all(name: str) -> None:
    """Return once all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
