"""Where in the user's code an operation is written."""

import dataclasses
import os
import sys
import sysconfig
from collections.abc import Sequence
from typing import NamedTuple

from halfstep._base import OWN_FILE, Traceback

# What the user calls, and whose lines say nothing to them.
_LIBRARIES = ("beartype", "chex", "equinox", "flax", "haiku", "halfstep", "jaxtyping", "optax")
_JAX = ("jax", "jaxlib", "numpy")


@dataclasses.dataclass(frozen=True)
class Source:
    """A line of a file, and the function that it is in."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.short} {self.function}" if self.file else "-"

    @property
    def short(self) -> str:
        """The file's name and the line: `train.py:12`."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else "-"


UNKNOWN = Source("", 0, "")


class Frame(NamedTuple):
    """A frame of a call."""

    file: str
    line: int
    function: str


class Finder:
    """Finds the innermost line that is not a library's."""

    def __init__(self) -> None:
        self._libraries = _folders(_LIBRARIES)
        self._jax = (*_folders(_JAX), _own_folder(sysconfig.get_path("stdlib")))
        self._found: dict[int, tuple[Traceback | None, tuple[Source, ...]]] = {}

    def find(self, traceback: Traceback | None) -> Source:
        """The line of the user's; of a library's, if only libraries are there."""
        return next(iter(self.calls(traceback)), UNKNOWN)

    def calls(self, traceback: Traceback | None) -> tuple[Source, ...]:
        """The same line and those of the calls that led there, the innermost first."""
        # The traceback is kept, so that no other one comes to have its number.
        known = self._found.get(id(traceback))
        if known is None:
            frames = traceback.frames if traceback is not None else ()
            calls = self._calls(
                [Frame(frame.file_name, frame.line_num, frame.function_name) for frame in frames]
            )
            known = self._found[id(traceback)] = (traceback, calls)
        return known[1]

    def choose(self, frames: Sequence[Frame]) -> Source:
        """The line of the user's among frames, the innermost first."""
        return next(iter(self._calls(frames)), UNKNOWN)

    def _calls(self, frames: Sequence[Frame]) -> tuple[Source, ...]:
        outside = [frame for frame in frames if not self._is_machinery(frame.file)]
        own = [frame for frame in outside if not frame.file.startswith(self._libraries)]
        return tuple(
            Source(_relative(frame.file), frame.line, _function(frame.function))
            for frame in own or outside
        )

    def _is_machinery(self, file: str) -> bool:
        if file == OWN_FILE:
            return True
        # Code that libraries make at run time, such as dataclasses' `<string>`, is not the user's;
        # what is typed into a prompt or a notebook is.
        if file.startswith("<") and not file.startswith(("<stdin", "<ipython")):
            return True
        if any(part in file for part in ("/site-packages/", "/dist-packages/")):
            # Installed packages lie in the standard library's folder: it does not count for them.
            return file.startswith(self._jax[:-1])
        return file.startswith(self._jax)


def _folders(names: tuple[str, ...]) -> tuple[str, ...]:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    return tuple(_own_folder(os.path.dirname(file)) for file in files if file)


def _own_folder(path: str) -> str:
    return os.path.join(path, "")


def _relative(file: str) -> str:
    cell = _cell(file)
    if cell:
        return cell
    here = _own_folder(os.getcwd())
    return file[len(here) :] if file.startswith(here) else file


def _cell(file: str) -> str:
    """What a notebook calls the cell that IPython compiled as this file: `In[3]`; or nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # Shells that are older, or not IPython's own, do not tell.
    tell = getattr(getattr(shell, "compile", None), "format_code_name", None)
    said = tell(file) if tell is not None else None
    return str(said[1]) if said else ""


def _function(name: str) -> str:
    # The inside of a function has its own name behind `<locals>`.
    return name.rpartition("<locals>.")[2]
