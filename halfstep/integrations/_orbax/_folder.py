"""The folder of a run: which steps are there, and what is in the way."""

from collections.abc import Sequence

import orbax.checkpoint as ocp
from etils import epath


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
