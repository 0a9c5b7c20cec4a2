"""Let the processes of one run tell each other short texts."""

import jax
import numpy as np
from jax.experimental import multihost_utils

# Gathering needs the same shape on all processes, so that every text has this much room. It is
# enough for a message, a digest, and the numbers of some hundred steps.
_ROOM = 2048


def gather(text: str) -> list[str]:
    """Return what each process says, by its number. All of them call it.

    Args:
        text: It is cut after 2048 bytes.
    """
    if jax.process_count() == 1:
        return [text]
    said = text.encode()[:_ROOM]
    room = np.zeros(_ROOM, np.uint8)
    room[: len(said)] = np.frombuffer(said, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(room)).reshape(-1, _ROOM)
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


def agree(reason: str | None) -> str | None:
    """The first reason any process has, the same on all; `None` if none has one."""
    # Every process has to come to the same decision: one that raises alone leaves the others
    # waiting in the next collective until the job is killed.
    for process, said in enumerate(gather(reason or "")):
        if said:
            return said if jax.process_count() == 1 else f"{said} (process {process})"
    return None


def first_says(text: str) -> str:
    """Return what process 0 says."""
    return gather(text)[0]


def wait_for_all(name: str) -> None:
    """Return once all processes have come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
