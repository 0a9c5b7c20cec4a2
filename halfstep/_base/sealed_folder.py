"""Seal a folder: a list of its files with their hashes, by which damage and strangers are found.

The list is one that `sha256sum --check` reads, or its like for another hash. A folder may come from
a stranger: files are bounded, and only regular ones inside the folder are opened, no devices, no
pipes, no links, and no paths that lead out of it. Folders may lie in a bucket, as `etils.epath` has
them; there are no links there, and nothing to flush.
"""

import concurrent.futures
import hashlib
import hmac
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

# A list of a million files, or a description of a million arrays.
_LARGEST_TEXT = 2**28
_LINE = re.compile(r"([0-9a-f]{64})  ([^\x00\\]+)")
_Path = Any
"""`pathlib.Path`, or `etils.epath.Path`, which has its methods."""


class Hashing(NamedTuple):
    """How files are hashed.

    Attributes:
        name: The hash's; the list has it in its own name.
        new: Begin to hash something; 32 bytes come out.
    """

    name: str
    new: Callable[[], Any]

    @property
    def sums(self) -> str:
        """The name of the list."""
        return f"files.{self.name}"

    def of_file(self, path: _Path) -> str:
        """The hash of a file."""
        found = self.new()
        with path.open("rb") as file:
            while part := file.read(2**20):
                found.update(part)
        return found.hexdigest()


SHA256 = Hashing("sha256", hashlib.sha256)


class DamagedFolderError(ValueError):
    """A folder that is not as it was sealed.

    The message is a reason, without a subject. Who catches it says of what, and what to do.
    """


def seal(
    folder: _Path,
    *,
    where: _Path,
    name_of: Callable[[str], str | None] = lambda name: name,
    hashing: Hashing = SHA256,
    key: bytes | None = None,
) -> None:
    """Write the list of all files of a folder.

    Where the power may fail, `flush` the folder afterwards.

    Args:
        folder: The folder.
        where: The folder in which the list is written.
        name_of: Returns the name of a file in the list; `None` for a file that is not listed.
        hashing: How files are hashed.
        key: Signs the list (HMAC with SHA-256).
    """
    named = ((name_of(name), path) for name, path in walk(folder))
    names = {name: path for name, path in named if name is not None}
    # Hashing releases the lock of the interpreter, so threads hash in parallel.
    with concurrent.futures.ThreadPoolExecutor() as pool:
        sums = pool.map(hashing.of_file, names.values())
    lines = "".join(f"{found}  {name}\n" for found, name in zip(sums, names, strict=True))
    # A comment is the hash of the lines before it: a list that was cut off would otherwise verify a
    # folder that lacks files.
    lines = f"{lines}# {hash_text(lines)}\n"
    if key is not None:
        lines = f"{lines}# hmac-sha256 {_signature(lines, key)}\n"
    (where / hashing.sums).write_text(lines)


def sealed_files(
    folder: _Path, where: str = "", *, hashing: Hashing = SHA256, key: bytes | None = None
) -> dict[str, str]:
    """The hashes that a folder's list says, by the names of files.

    Args:
        folder: The folder.
        where: The name of the folder inside it that has the list.
        hashing: How files were hashed.
        key: With one, the list must be signed by it.

    Raises:
        DamagedFolderError: If the list is missing, damaged, or not signed.
    """
    name = f"{where}/{hashing.sums}" if where else hashing.sums
    text = read_text(folder, name).decode(errors="replace")
    lines, mark, rest = text.partition("# ")
    own, _, signed = rest.partition("\n")
    if not mark or own != hash_text(lines):
        raise DamagedFolderError(f"`{name}` is not what was written")
    if key is not None:
        covered = f"{lines}# {own}\n"
        expected = f"# hmac-sha256 {_signature(covered, key)}\n"
        if not hmac.compare_digest(signed.encode(), expected.encode()):
            raise DamagedFolderError(f"`{name}` is not signed with the key that was given")
    listed: dict[str, str] = {}
    for line in lines.split("\n")[:-1]:
        found = _LINE.fullmatch(line)
        if found is None:
            raise DamagedFolderError(f"`{name}` has a line that names no file: {line[:80]!r}")
        listed[found[2]] = found[1]
    return listed


def check_files(
    folder: _Path, expected: Mapping[str, str], *, most: int, hashing: Hashing = SHA256
) -> None:
    """Check that files are what was written, and have at most so many bytes each.

    Args:
        folder: Where they are.
        expected: Their hashes, by their names.
        most: The largest number of bytes.
        hashing: How files were hashed.

    Raises:
        DamagedFolderError: If one is not; the first of them.
    """
    paths = [regular_file(folder, name, most=most) for name in expected]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, found in zip(expected, pool.map(hashing.of_file, paths), strict=True):
            if found != expected[name]:
                raise DamagedFolderError(f"`{name}` is not what was written")


def check_nothing_added(
    folder: _Path, listed: dict[str, str], is_sealed: Callable[[str], bool]
) -> None:
    """Check that a folder has no files that its list has not.

    Raises:
        DamagedFolderError: If it has.
    """
    for name, _ in walk(folder):
        if is_sealed(name) and name not in listed:
            raise DamagedFolderError(f"`{name}` was added after it was written")


def read_text(folder: _Path, name: str) -> bytes:
    """The content of a small file.

    Raises:
        DamagedFolderError: If it cannot be read without harm.
    """
    try:
        return regular_file(folder, name, most=_LARGEST_TEXT).read_bytes()
    except OSError as error:
        raise DamagedFolderError(f"the small file `{name}` cannot be read: {error}") from error


def read_json(folder: _Path, name: str) -> Any:
    """What a small file says in JSON.

    Raises:
        DamagedFolderError: If it is none.
    """
    text = read_text(folder, name)
    try:
        return json.loads(text)
    except RecursionError:
        raise DamagedFolderError(f"`{name}` is not JSON: it is nested too deep") from None
    except ValueError as error:
        raise DamagedFolderError(f"`{name}` is not JSON: {error}") from error


def regular_file(folder: _Path, name: str, *, most: int) -> _Path:
    """A file inside a folder that can be read without harm.

    Raises:
        DamagedFolderError: If it is not there, is none, is too large, or is somewhere else.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise DamagedFolderError(f"it lists {name[:80]!r}, which is outside its folder")
    path, shown = folder.joinpath(*parts), f"`{name[:200]}`"
    if not is_in_file_system(path):
        if not path.exists():
            raise DamagedFolderError(f"{shown} is missing from its folder")
        return path
    for count in range(1, len(parts) + 1):
        try:
            found = os.lstat(folder.joinpath(*parts[:count]))
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedFolderError(f"{shown} is missing from its folder") from None
        is_last = count == len(parts)
        if not (stat.S_ISREG if is_last else stat.S_ISDIR)(found.st_mode):
            raise DamagedFolderError(f"{shown} is not a regular file in its folder")
        if is_last and found.st_size > most:
            raise DamagedFolderError(f"{shown} has {found.st_size:,} bytes, more than there can be")
    return path


def walk(folder: _Path, below: str = "") -> Iterator[tuple[str, _Path]]:
    """All files in a folder and those inside it, by their names from there. No link is followed."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.is_dir() and not (is_in_file_system(path) and os.path.islink(path)):
            yield from walk(path, f"{below}{path.name}/")
        else:
            yield f"{below}{path.name}", path


def is_in_file_system(path: os.PathLike[str]) -> bool:
    """Whether a path is in a file system, and not in a bucket."""
    return "://" not in os.fspath(path)


def hash_text(text: str) -> str:
    """The SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _signature(text: str, key: bytes) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def flush(folder: _Path) -> None:
    """Return once all that is in a folder is on the disk."""
    if not is_in_file_system(folder):
        return
    for root, _, names in os.walk(folder):
        for path in (*(os.path.join(root, name) for name in names), root):
            flush_one(path)


def flush_one(path: str | os.PathLike[str]) -> None:
    """Return once a file, or the names in a folder, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
