"""Find the line of the user's code in which an operation is written."""

import dataclasses
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from halfstep._base import OWN_FOLDER, Traceback

# Libraries that the user calls. Lines inside them tell the user nothing.
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
        # Programs have many operations on few lines of few files. Tracebacks are kept alive, so
        # that no other traceback gets the same `id`.
        self._found: dict[int, tuple[Traceback | None, Source]] = {}
        self._files: dict[str, _File] = {}

    def find(self, traceback: Traceback | None) -> Source:
        """Return the user's line, or a library's line if there are only libraries."""
        known = self._found.get(id(traceback))
        if known is None:
            source = next(self._calls(_frames(traceback)), UNKNOWN)
            known = self._found[id(traceback)] = (traceback, source)
        return known[1]

    def calls(self, traceback: Traceback | None) -> tuple[Source, ...]:
        """Return the line that `find` returns and the calls that led there, innermost first."""
        return tuple(self._calls(_frames(traceback)))

    def choose(self, frames: Sequence[Frame]) -> Source:
        """Return the user's line among frames that begin with the innermost."""
        return next(self._calls(frames), UNKNOWN)

    def _calls(self, frames: Iterable[Frame]) -> Iterator[Source]:
        of_libraries: list[Frame] = []
        has_own = False
        for frame in frames:
            file = self._file(frame.file)
            if file.is_machinery:
                continue
            if file.is_library:
                of_libraries.append(frame)
                continue
            has_own = True
            yield self._source(frame)
        if not has_own:
            yield from map(self._source, of_libraries)

    def _source(self, frame: Frame) -> Source:
        return Source(self._file(frame.file).name, frame.line, _function(frame.function))

    def _file(self, file: str) -> "_File":
        if file not in self._files:
            self._files[file] = _File(
                self._is_machinery(file), file.startswith(self._libraries), _relative(file)
            )
        return self._files[file]

    def _is_machinery(self, file: str) -> bool:
        if file.startswith(OWN_FOLDER):
            return True
        # Code that libraries make at run time, such as dataclasses' `<string>`, is not the user's;
        # code that is typed into a prompt or a notebook is.
        if file.startswith("<") and not file.startswith(("<stdin", "<ipython")):
            return True
        if any(part in file for part in ("/site-packages/", "/dist-packages/")):
            # Installed packages lie inside the standard library's folder, so that folder does not
            # count for them.
            return file.startswith(self._jax[:-1])
        return file.startswith(self._jax)


class _File(NamedTuple):
    is_machinery: bool
    is_library: bool
    name: str
    """As reports show it."""


def _frames(traceback: Traceback | None) -> Iterator[Frame]:
    for frame in traceback.frames if traceback is not None else ():
        yield Frame(frame.file_name, frame.line_num, frame.function_name)


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
    """Return the name of the notebook cell that is compiled as a file, `In[3]`; "" if none is."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # Older shells, and shells that are not IPython's own, do not have this method.
    tell = getattr(getattr(shell, "compile", None), "format_code_name", None)
    said = tell(file) if tell is not None else None
    return str(said[1]) if said else ""


def _function(name: str) -> str:
    # The own name of a function inside a function comes after `<locals>`.
    return name.rpartition("<locals>.")[2]
