"""Can a file be written? Asked before there is anything to write."""

import os
import pathlib

from halfstep.cli._errors import CommandError


def check_writable(name: str | None, *, endings: tuple[str, ...] = ()) -> None:
    """Refuse a file that could not be written, or that does not end as it should."""
    if name is None:
        return
    path = pathlib.Path(name)
    if endings and path.suffix.lower() not in endings:
        raise CommandError(
            f"cannot write {name!r}: the name must end in {' or '.join(endings)}. "
            "Give another name."
        )
    if not path.parent.is_dir():
        raise CommandError(
            f"cannot write {name!r}: there is no folder {str(path.parent)!r}. Make it first."
        )
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "it is a folder" if path.is_dir() else "permission denied"
        raise CommandError(f"cannot write {name!r}: {why}. Give another name.")
