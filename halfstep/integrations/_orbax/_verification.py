"""Verify a step before it is read: what is there is what was written, and nothing else is touched.

A step may come from a stranger: see `sealed_folder`.
"""

from typing import Any

import jax
from etils import epath

from halfstep._base import (
    DamagedFolderError,
    Hashing,
    check_files,
    check_nothing_added,
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
    check_unsealed,
    data_name,
    is_sealed,
)
from halfstep.integrations._orbax._manifest import Manifest

# Orbax's own files, and what a format of arrays needs beyond the arrays.
_REST = 2**26


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


def verified(
    folder: epath.Path, step: int, *, part: int = 0, parts: int = 1, key: bytes | None = None
) -> Manifest:
    """Read a step's manifest, if all of its files are what was written.

    Nothing else reads the files before that: the libraries that read arrays and metadata believe
    the sizes that the files say.

    Args:
        folder: The step's folder.
        step: The step's number.
        part: Which part of the files to read: each process takes another one, so that verifying
            takes as long as reading once.
        parts: How many parts there are.
        key: With a key, the list of files must be signed by it.

    Raises:
        DamagedFolderError: If they are not.
    """
    try:
        if not folder.is_dir():
            raise DamagedFolderError("its folder is missing")
        if not any(folder.iterdir()):
            raise DamagedFolderError("its folder is empty")
        if not (folder / ABOUT).is_dir():
            raise DamagedFolderError(f"another program wrote it: there is no `{ABOUT}` in it")
        hashing = _hashing_of(folder, step)
        listed = sealed_files(folder, ABOUT, hashing=hashing, key=key)
        if part == 0:
            check_nothing_added(folder, listed, is_sealed)
            check_unsealed(folder)
        name = f"{ABOUT}/{MANIFEST}"
        if name not in listed:
            raise DamagedFolderError(f"it has no `{name}` in its list of files")
        check_files(folder, {name: listed[name]}, most=_REST, hashing=hashing)
        manifest = _manifest.read(read_json(folder, name), step)
        own = list(listed)[part::parts]
        rest = {other: listed[other] for other in own if other != name}
        check_files(folder, rest, most=2 * manifest.array_bytes + _REST, hashing=hashing)
    except OSError as error:
        raise DamagedFolderError(f"the step cannot be read: {error}") from error
    return manifest


def read_data(folder: epath.Path) -> Any:
    """Read the state of this process's data iterator.

    Raises:
        CheckpointError: If other numbers of processes wrote states that differ.
        DamagedFolderError: If the file is not valid JSON.
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
