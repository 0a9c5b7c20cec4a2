"""Read, write and verify the files of each step in the folder of a run.

A step's folder is Orbax's. Beside its `state` there is `about`, with

- `manifest.json`: what each leaf is, and the digest of its bits;
- `data-0-of-1.json`: the state of each process's data iterator, if there is one;
- `files.sha256`: the hash of every file, as `sha256sum --check about/files.sha256` reads it.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from halfstep.integrations._orbax._errors import CheckpointError

STATE, ABOUT = "state", "about"
_MANIFEST, _SUMS = "manifest.json", "files.sha256"
# What Orbax writes once all else is there: times, and that it is done. Nothing is restored from it.
_AFTERWARDS = ("_CHECKPOINT_METADATA", "commit_success.txt")


class AboutHandler(ocp.CheckpointHandler):
    """Writes `about`. It is to be finalized after `state`, whose files it hashes."""

    def save(self, directory: epath.Path, args: "SaveAbout") -> None:
        """Write the manifest, on process 0, and the state of this process's data iterator."""
        if jax.process_index() == 0:
            (directory / _MANIFEST).write_text(json.dumps(args.manifest, indent=1))
        if args.data is not None:
            name = _data_name(jax.process_index(), jax.process_count())
            (directory / name).write_text(json.dumps(args.data))

    def restore(self, directory: epath.Path, args: object = None) -> Any:
        """Not by Orbax: see `read_manifest`."""
        # Orbax does not call it.
        raise NotImplementedError

    def finalize(self, directory: epath.Path) -> None:
        """Hash all files, on the one process that calls it and in Orbax's own thread."""
        step = directory.parent
        names = {name: path for name, path in _walk(step, "") if _is_ours(name)}
        # Orbax gives this folder its name only later.
        renamed = {
            name.replace(f"{directory.name}/", f"{ABOUT}/", 1): p for name, p in names.items()
        }
        # hashlib releases the lock of the interpreter, so threads hash in parallel.
        with concurrent.futures.ThreadPoolExecutor() as pool:
            sums = pool.map(_hash, renamed.values())
        lines = "".join(f"{found}  {name}\n" for found, name in zip(sums, renamed, strict=True))
        # The last line is the hash of the lines before it: a list that was cut off would otherwise
        # verify a step that lacks files.
        (directory / _SUMS).write_text(f"{lines}# {hash_text(lines)}\n")


@ocp.args.register_with_handler(AboutHandler, for_save=True)
@dataclasses.dataclass
class SaveAbout(ocp.args.CheckpointArgs):
    """What `AboutHandler` writes."""

    manifest: dict[str, Any]
    data: Any


@ocp.args.register_with_handler(AboutHandler, for_restore=True)
@dataclasses.dataclass
class RestoreAbout(ocp.args.CheckpointArgs):
    """Needed to register the handler."""


def _walk(folder: epath.Path, below: str) -> Iterator[tuple[str, epath.Path]]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.is_dir():
            yield from _walk(path, f"{below}{path.name}/")
        else:
            yield f"{below}{path.name}", path


def _is_ours(name: str) -> bool:
    at_the_top = "/" not in name
    return not (at_the_top and name in _AFTERWARDS)


def _hash(path: epath.Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(2**20):
            found.update(part)
    return found.hexdigest()


def hash_text(text: str) -> str:
    """The hash of a text, as of a file."""
    return hashlib.sha256(text.encode()).hexdigest()


def _data_name(process: int, processes: int) -> str:
    return f"data-{process}-of-{processes}.json"


def looks_complete(step: epath.Path) -> bool:
    """Return whether a folder has what is written last. It does not look into files."""
    return (step / ABOUT / _SUMS).exists()


def why_damaged(step: epath.Path, part: int = 0, parts: int = 1) -> str | None:
    """Why a step cannot be used, `None` if it can.

    Args:
        step: Its folder.
        part: Which part of the files to read: each process takes another one.
        parts: How many parts there are.
    """
    try:
        if not step.is_dir():
            return "there is no such folder"
        if not any(step.iterdir()):
            return "its folder is empty"
        if not (step / ABOUT).is_dir():
            return f"another program wrote it: there is no `{ABOUT}` in it"
        if not looks_complete(step):
            return f"it is incomplete: `{ABOUT}/{_SUMS}` is missing"
        text = (step / ABOUT / _SUMS).read_bytes().decode(errors="replace")
        lines, _, own = text.rpartition("# ")
        if own != f"{hash_text(lines)}\n":
            return f"`{ABOUT}/{_SUMS}` is not what was written"
        listed = [line.split("  ", 1) for line in lines.splitlines()]
        # Each process reads its share, so that verifying takes as long as reading and not as many
        # times.
        for expected, name in listed[part::parts]:
            if not (step / name).exists():
                return f"`{name}` is missing"
            if _hash(step / name) != expected:
                return f"`{name}` is not what was written"
    except OSError as error:
        return f"it cannot be read: {error}"
    return None


def read_manifest(step: epath.Path) -> dict[str, Any]:
    """Read what each leaf is, and of which run the step is."""
    return json.loads((step / ABOUT / _MANIFEST).read_text())


def read_data(step: epath.Path) -> Any:
    """The state of this process's data iterator.

    Raises:
        CheckpointError: If other numbers of processes wrote states that differ.
        FileNotFoundError: If there is none.
    """
    process, processes = jax.process_index(), jax.process_count()
    # With as many processes as before, each goes on from its own place.
    own = step / ABOUT / _data_name(process, processes)
    if own.exists():
        return json.loads(own.read_text())
    files = [path for path in (step / ABOUT).iterdir() if path.name.startswith("data-")]
    if not files:
        # The caller catches it and raises a CheckpointError.
        raise FileNotFoundError
    texts = {path.read_text() for path in files}
    # Iterators that were all at one place can be split among any number of processes.
    if len(texts) > 1:
        raise CheckpointError(
            f"the data iterators of {len(files)} processes are each at another place, and there "
            f"are {processes} processes now. Resume with {len(files)}, or give every process the "
            "same order of batches and let it take its rows of each: then the states are the same "
            "and fit any number of processes."
        )
    return json.loads(texts.pop())


# The folder of a run.


def numbered(folder: epath.Path) -> list[int]:
    """The folders that are named like steps, whatever is in them."""
    return sorted(int(path.name) for path in folder.iterdir() if _is_step(path))


def _is_step(path: epath.Path) -> bool:
    return path.name.isdecimal() and str(int(path.name)) == path.name and path.is_dir()


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
    """Delete what a killed run left of a step that it was writing."""
    for path in folder.iterdir():
        if ocp.utils.TMP_DIR_SUFFIX in path.name:
            path.rmtree()
