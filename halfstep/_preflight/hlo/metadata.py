"""Find the scope and the user's line that an instruction of a compiled program comes from."""

import dataclasses
import re
from collections.abc import Sequence
from typing import TypeVar

from halfstep._preflight.hlo.wire import Message
from halfstep._program import Finder, Frame

# The most frames of a call. It ends the walk if a damaged table has a cycle.
_DEEPEST = 1000
# The names that JAX writes around a compiled step.
_OURS = re.compile(r"^jit\(call\)/call_exported/(?:jit\(flat\)/)?|^jit\([^)]*\)/")


@dataclasses.dataclass(frozen=True)
class InstructionOrigin:
    """Where an instruction comes from.

    Attributes:
        name: The scopes and the operation, as JAX wrote them: `jvp(mlp)/dot_general`.
        source: The user's line, `train.py:12`; empty if it is not known.
    """

    name: str
    source: str


class StackTables:
    """Finds the user's line from a program's tables of files, functions, locations and frames."""

    def __init__(self, index: Message):
        """Take the tables, a message `StackFrameIndexProto`. Their rows are numbered from 1."""
        self._files, self._functions = index.texts(1), index.texts(2)
        self._locations, self._frames = tuple(index.messages(3)), tuple(index.messages(4))
        # Newer compilers write the parent's number plus one: the first frame, which has no parent,
        # has a 1.
        first = _row(self._frames, 1)
        self._offset = 1 if first is not None and first.integer(2) == 1 else 0
        self._finder = Finder()
        self._found: dict[int, str] = {}

    def source(self, file: str, line: int, frame: int) -> str:
        """Find the user's line, `train.py:12`; empty if it is not known.

        Older compilers write file and line into every instruction. Newer compilers write the number
        of a frame in a table.
        """
        if file:
            return self._short([Frame(file, line, "")])
        if frame not in self._found:
            self._found[frame] = self._short(self._stack(frame))
        return self._found[frame]

    def _short(self, frames: list[Frame]) -> str:
        found = self._finder.choose(frames)
        return found.short if found.file else ""

    def _stack(self, number: int) -> list[Frame]:
        """Return the frames of a call, innermost first."""
        stack: list[Frame] = []
        while (frame := _row(self._frames, number)) and len(stack) < _DEEPEST:
            location = _row(self._locations, frame.integer(1)) or Message(b"")
            file = _row(self._files, location.integer(1)) or ""
            function = _row(self._functions, location.integer(2)) or ""
            stack.append(Frame(file, location.integer(3), function))
            number = frame.integer(2) - self._offset
        return stack


def without_call(name: str) -> str:
    """Return an operation's name without the names that JAX writes around a compiled step."""
    return _OURS.sub("", name)


_Row = TypeVar("_Row")


def _row(table: Sequence[_Row], number: int) -> _Row | None:
    return table[number - 1] if 0 < number <= len(table) else None
