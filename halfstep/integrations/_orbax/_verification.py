"""Verify a step before it is read: what is there is what was written, and nothing else is touched.

A step may come from a stranger: see `sealed_folder`.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import jax
from etils import epath

from halfstep._base import (
    DamagedFolderError,
    Hashing,
    check_files,
    check_nothing_added,
    checking_files,
    read_json,
    read_text,
    sealed_files,
)
from halfstep.integrations._orbax import _manifest
from halfstep.integrations._orbax._errors import CheckpointError
from halfstep.integrations._orbax._files import (
    ABOUT,
    HASHINGS,
    LISTS,
    MANIFEST,
    data_name,
    is_sealed,
)
from halfstep.integrations._orbax._manifest import Manifest

# Orbax's own files, and what a format of arrays needs beyond the arrays.
_REST = 2**26
_DATA = "/d/"
"""The folders in which Orbax's format has the arrays' bytes, and nothing else."""


def looks_complete(folder: epath.Path) -> bool:
    """Return whether a folder has what is written last. It does not look into files."""
    return any((folder / ABOUT / sums).exists() for sums in LISTS)


def _hashing_of(folder: epath.Path, step: int) -> Hashing:
    """How the files of a step were hashed."""
    for hashing in HASHINGS:
        if (folder / ABOUT / hashing.sums).exists():
            return hashing
    if looks_complete(folder):
        raise CheckpointError(
            f"step {step} in {folder.parent} was hashed with BLAKE3, and the package `blake3` is "
            'not installed. Install it with: pip install "halfstep[orbax]"'
        )
    raise DamagedFolderError(f"it is incomplete: `{ABOUT}/{HASHINGS[0].sums}` is missing")


@contextlib.contextmanager
def verifying(
    folder: epath.Path, step: int, *, part: int = 0, parts: int = 1, key: bytes | None = None
) -> Generator[tuple[Manifest, Callable[[], None]], None, None]:
    """Read a step's manifest, and verify its files while a block runs.

    The manifest and all that says where arrays are have been verified when the block begins. The
    arrays themselves are most of the bytes, and to hash them takes as long as to read them: threads
    do it meanwhile. Two cases verify all before the block begins: with a key, nothing is read that
    is not signed; and of several processes, all would wait in Orbax for one that cannot read its
    files.

    Args:
        folder: The step's.
        step: Its number.
        part: Which part of the files to read: each process takes another one, so that verifying
            takes as long as reading once.
        parts: How many parts there are.
        key: With one, the list of files must be signed by it.

    Yields:
        The manifest, and a function that waits until all files of this part are verified.

    Raises:
        DamagedFolderError: If they are not what was written. The function raises it as well.
    """
    with contextlib.ExitStack() as stack:
        with _damaged_if_not_readable():
            hashing, manifest, rest = _verified_manifest(folder, step, key)
            if part == 0:
                check_nothing_added(folder, rest, is_sealed)
            own = {name: rest[name] for name in list(rest)[part::parts]}
            most = 2 * manifest.array_bytes + _REST
            arrays = {name: found for name, found in own.items() if _DATA in name}
            others = {name: found for name, found in own.items() if name not in arrays}
            check_files(folder, others, most=most, hashing=hashing)
            checking = checking_files(folder, arrays, most=most, hashing=hashing)
            checked = stack.enter_context(checking)

        def finish() -> None:
            with _damaged_if_not_readable():
                checked()

        if key is not None or parts > 1:
            finish()
        yield manifest, finish


@contextlib.contextmanager
def _damaged_if_not_readable() -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise DamagedFolderError(f"the step cannot be read: {error}") from error


def _verified_manifest(
    folder: epath.Path, step: int, key: bytes | None
) -> tuple[Hashing, Manifest, dict[str, str]]:
    """How the files of a step were hashed, its manifest, and the hashes of all files."""
    if not folder.is_dir():
        raise DamagedFolderError("its folder is missing")
    if not any(folder.iterdir()):
        raise DamagedFolderError("its folder is empty")
    if not (folder / ABOUT).is_dir():
        raise DamagedFolderError(f"another program wrote it: there is no `{ABOUT}` in it")
    hashing = _hashing_of(folder, step)
    listed = sealed_files(folder, ABOUT, hashing=hashing, key=key)
    name = f"{ABOUT}/{MANIFEST}"
    if name not in listed:
        raise DamagedFolderError(f"it has no `{name}` in its list of files")
    check_files(folder, {name: listed[name]}, most=_REST, hashing=hashing)
    return hashing, _manifest.read(read_json(folder, name), step), listed


def read_data(folder: epath.Path) -> Any:
    """The state of this process's data iterator.

    Raises:
        CheckpointError: If other numbers of processes wrote states that differ.
        DamagedFolderError: If it is no JSON.
        FileNotFoundError: If there is none.
    """
    process, processes = jax.process_index(), jax.process_count()
    # With as many processes as before, each goes on from its own place.
    own = data_name(process, processes)
    if (folder / ABOUT / own).exists():
        return read_json(folder, f"{ABOUT}/{own}")
    names = [path.name for path in (folder / ABOUT).iterdir() if path.name.startswith("data-")]
    if not names:
        # The caller catches it and raises a CheckpointError.
        raise FileNotFoundError
    texts = {read_text(folder, f"{ABOUT}/{name}") for name in names}
    # Iterators that were all at one place can be split among any number of processes.
    if len(texts) > 1:
        raise CheckpointError(
            f"the data iterators of {len(names)} processes are each at another place, and there "
            f"are {processes} processes now. Resume with {len(names)}, or give every process the "
            "same order of batches and let it take its rows of each: then the states are the same "
            "and fit any number of processes."
        )
    return read_json(folder, f"{ABOUT}/{names[0]}")
