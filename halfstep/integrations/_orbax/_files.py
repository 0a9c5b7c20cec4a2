"""Write the files of each step in the folder of a run.

A step's folder is Orbax's. Next to its `state` there is `about`, with

- `manifest.json`: what each leaf is, and the digest of its bits;
- `data-0-of-1.json`: the state of each process's data iterator, if there is one;
- `files.blake3`: the hash of every file, and with a key the list's signature. Where the package
  `blake3` is not installed it is `files.sha256`.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.future import CommitFutureAwaitingContractedSignals, Future

try:
    from blake3 import blake3
except ModuleNotFoundError:
    blake3 = None

from halfstep._base import (
    SHA256,
    Hashing,
    flush,
    is_in_file_system,
    regular_file,
    seal,
    size,
)

STATE, ABOUT = "state", "about"
MANIFEST = "manifest.json"
# BLAKE3 is as strong as SHA-256, and ten times as fast on processors without instructions for the
# latter, where hashing would take longer than writing.
BLAKE3 = None if blake3 is None else Hashing("blake3", blake3)
HASHINGS = tuple(hashing for hashing in (BLAKE3, SHA256) if hashing is not None)
"""How files may be hashed; the first is how they are when a step is written."""
LISTS = ("files.blake3", SHA256.sums)
"""Names that the list of hashes may have."""
# Orbax writes these files last: times, and a mark of success. Nothing is restored from them.
_AFTERWARDS = ("_CHECKPOINT_METADATA", "commit_success.txt", f"{ABOUT}/commit_success.txt")
_LARGEST_METADATA = 2**20
_UNFINISHED = re.compile(rf"\d+{re.escape(ocp.utils.TMP_DIR_SUFFIX)}(-\d+)?")


class AboutHandler(ocp.AsyncCheckpointHandler):
    """Writes `about`. It is to be finalized after `state`, whose files it hashes."""

    def __init__(self, key: bytes | None = None):
        self._key = key
        self._manifest: Callable[[], str] | None = None

    async def async_save(self, directory: epath.Path, args: "SaveAbout") -> list[Future]:
        """Keep the manifest for later, and write the place in the data in a thread of Orbax's.

        The caller waits for this, but not for the folder, which Orbax makes meanwhile.
        """
        self._manifest = args.manifest
        if args.data is None:
            return []
        writing = _write_data(directory, json.dumps(args.data, allow_nan=False))
        return [CommitFutureAwaitingContractedSignals(writing, name="halfstep: data")]

    def save(self, directory: epath.Path, args: "SaveAbout") -> None:
        """Do the same as `async_save`, and wait for it."""
        for writing in asyncio.run(self.async_save(directory, args)):
            writing.result()

    def restore(self, directory: epath.Path, args: object = None) -> Any:
        """Not by Orbax: see `verified`."""
        # Orbax does not call it.
        raise NotImplementedError

    def finalize(self, directory: epath.Path) -> None:
        """Write the manifest and hash all files, on process 0 and in Orbax's own thread."""
        if self._manifest is not None:
            (directory / MANIFEST).write_text(self._manifest())

        def name_of(name: str) -> str | None:
            # Orbax gives this folder its name only later.
            final = name.replace(f"{directory.name}/", f"{ABOUT}/", 1)
            return final if is_sealed(final) else None

        # When Orbax renames the folder, the step counts as written. A machine that loses its power
        # a moment later must find the content behind that name. The disk writes the arrays while
        # they are hashed, and then the list of their hashes.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            flushed = pool.submit(flush, directory.parent)
            seal(
                directory.parent,
                where=directory,
                name_of=name_of,
                hashing=HASHINGS[0],
                key=self._key,
            )
            flushed.result()
        flush(directory)


async def _write_data(directory: epath.Path, text: str) -> None:
    """Write the state of this process's data iterator."""
    (directory / data_name(jax.process_index(), jax.process_count())).write_text(text)


@ocp.args.register_with_handler(AboutHandler, for_save=True)
@dataclasses.dataclass
class SaveAbout(ocp.args.CheckpointArgs):
    """What `AboutHandler` writes."""

    manifest: Callable[[], str]
    """Its text, once the digests are there."""
    data: Any


@ocp.args.register_with_handler(AboutHandler, for_restore=True)
@dataclasses.dataclass
class RestoreAbout(ocp.args.CheckpointArgs):
    """Needed to register the handler."""


def is_sealed(name: str) -> bool:
    """Whether a file is there when files are hashed."""
    return name not in (*_AFTERWARDS, *(f"{ABOUT}/{sums}" for sums in LISTS))


def check_unsealed(step: epath.Path) -> None:
    """Check the files that Orbax writes after the list of hashes, and reads itself.

    Raises:
        DamagedFolderError: If one is large, or a link: reading a device would never end.
    """
    for name in _AFTERWARDS:
        if os.path.lexists(step / name):
            regular_file(step, name, most=_LARGEST_METADATA)


def data_name(process: int, processes: int) -> str:
    """The file of a process's data iterator."""
    return f"data-{process}-of-{processes}.json"


# The folder of a run.


def numbered(folder: epath.Path) -> list[int]:
    """The folders that are named like steps, whatever is in them."""
    return sorted(int(path.name) for path in folder.iterdir() if _is_step(path))


def _is_step(path: epath.Path) -> bool:
    # No step has more digits: they would not fit into the arrays that count steps.
    is_number = path.name.isdecimal() and len(path.name) <= 18
    return is_number and str(int(path.name)) == path.name and path.is_dir()


def why_not_writable(folder: epath.Path) -> str | None:
    """Why nothing can be written to a folder; `None` if something can."""
    if not is_in_file_system(folder):
        return None
    probe = folder / f".halfstep-probe-{os.getpid()}"
    try:
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        return f"it cannot be written to: {error}"
    return None


def why_no_room(folder: epath.Path, needed: int) -> str | None:
    """Why so many bytes do not fit on the disk of a folder; `None` if they do."""
    if not is_in_file_system(folder):
        return None
    free = shutil.disk_usage(folder).free
    if free < needed:
        return f"the step takes up to {size(needed)}, and {size(free)} of the disk are free"
    return None


def set_aside(folder: epath.Path, steps: Sequence[int]) -> None:
    """Give damaged steps a name by which nobody takes them for one. Nothing is deleted.

    They would count among the steps that are kept, and the good ones would be deleted for them.
    """
    for step in steps:
        number = 0
        while (folder / f"{step}.damaged-{number}").exists():
            number += 1
        (folder / str(step)).rename(folder / f"{step}.damaged-{number}")


def remove_unfinished(folder: epath.Path) -> None:
    """Delete what a killed run left of a step that it was writing, and nothing else.

    Another program that uses Orbax gives its folders the same names. Ours has nothing in it but
    what this library writes.
    """
    for path in folder.iterdir():
        if _UNFINISHED.fullmatch(path.name) and path.is_dir() and _is_own(path):
            with contextlib.suppress(FileNotFoundError):
                path.rmtree()


def _is_own(unfinished: epath.Path) -> bool:
    names = [path.name.partition(ocp.utils.TMP_DIR_SUFFIX)[0] for path in unfinished.iterdir()]
    return set(names) <= {STATE, ABOUT, *_AFTERWARDS}
