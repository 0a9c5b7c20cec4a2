"""Find the scope and the user's line that an instruction of a compiled program comes from."""

import dataclasses
import re
from collections.abc import Mapping

from halfstep._preflight.hlo.parser import Instruction
from halfstep._program import Finder, Frame

_NAMES = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_FIELDS = re.compile(r"(\w+)=(\d+)")
_ROWS = re.compile(r"^(\d+) \{([^}]*)\}$", re.MULTILINE)
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FILE = re.compile(r'\bsource_file="([^"]*)"(?:.*?\bsource_line=(\d+))?')
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
    """Finds the user's line from a program's tables of files, locations and frames."""

    def __init__(
        self,
        files: Mapping[int, str],
        functions: Mapping[int, str],
        locations: Mapping[int, Mapping[str, int]],
        frames: Mapping[int, Mapping[str, int]],
    ):
        """Take the tables, each keyed by the numbers of its rows, which begin with 1."""
        self._files, self._functions = files, functions
        self._locations, self._frames = locations, frames
        # The text of newer compilers has the parent's number plus one: the first frame, which has
        # no parent, has a 1.
        first = frames.get(1, {})
        self._offset = 1 if first.get("parent_frame_id") == 1 else 0
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
        # The limit ends the walk if a damaged table has a cycle.
        while number in self._frames and len(stack) < len(self._frames):
            frame = self._frames[number]
            location = self._locations.get(frame.get("file_location_id", 0), {})
            file = self._files.get(location.get("file_name_id", 0), "")
            function = self._functions.get(location.get("function_name_id", 0), "")
            stack.append(Frame(file, location.get("line", 0), function))
            number = frame.get("parent_frame_id", 0) - self._offset
        return stack


class Origins:
    """Finds where instructions come from, using the tables at the head of a program's text."""

    def __init__(self, text: str):
        head = text[: text.find("\nENTRY ")] if "\nENTRY " in text else ""
        self._stacks = StackTables(
            _names(head, "FileNames"),
            _names(head, "FunctionNames"),
            _rows(head, "FileLocations"),
            _rows(head, "StackFrames"),
        )

    def of(self, instruction: Instruction) -> InstructionOrigin:
        """Find where an instruction comes from."""
        metadata = instruction.attributes.get("metadata", "")
        name = _OP_NAME.search(metadata)
        file, frame = _FILE.search(metadata), _FRAME.search(metadata)
        source = self._stacks.source(
            file[1] if file else "", int(file[2] or 0) if file else 0, int(frame[1]) if frame else 0
        )
        return InstructionOrigin(without_call(name[1]) if name else "", source)


def without_call(name: str) -> str:
    """Return an operation's name without the names that JAX writes around a compiled step."""
    return _OURS.sub("", name)


def _section(head: str, title: str) -> str:
    """Return the lines below a title, up to the next empty line."""
    start = head.find(f"\n{title}\n")
    return "" if start < 0 else head[start + len(title) + 2 :].partition("\n\n")[0]


def _names(head: str, title: str) -> dict[int, str]:
    return {int(number): name for number, name in _NAMES.findall(_section(head, title))}


def _rows(head: str, title: str) -> dict[int, dict[str, int]]:
    return {
        int(number): {key: int(value) for key, value in _FIELDS.findall(fields)}
        for number, fields in _ROWS.findall(_section(head, title))
    }
