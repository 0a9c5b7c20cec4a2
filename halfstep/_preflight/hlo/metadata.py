"""Find the scope and the user's line that an instruction of a compiled program comes from."""

import dataclasses
import re

from halfstep._preflight.hlo.parser import Instruction
from halfstep._program import Finder, Frame

_NAMES = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_FIELDS = re.compile(r"(\w+)=(\d+)")
_ROWS = re.compile(r"^(\d+) \{([^}]*)\}$", re.MULTILINE)
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FILE = re.compile(r'\bsource_file="([^"]*)"(?:.*?\bsource_line=(\d+))?')
# What JAX writes around a step that is compiled.
_OURS = re.compile(r"^jit\(call\)/call_exported/(?:jit\(flat\)/)?|^jit\([^)]*\)/")


@dataclasses.dataclass(frozen=True)
class InstructionOrigin:
    """Where an instruction comes from.

    Attributes:
        name: The scopes and the operation, as JAX has written them: `jvp(mlp)/dot_general`.
        source: The user's line, `train.py:12`; empty if it is not known.
    """

    name: str
    source: str


class Origins:
    """Finds where instructions come from, by the tables at the head of a program's text."""

    def __init__(self, text: str):
        head = text[: text.find("\nENTRY ")] if "\nENTRY " in text else ""
        self._files = _names(head, "FileNames")
        self._functions = _names(head, "FunctionNames")
        self._locations = _rows(head, "FileLocations")
        self._frames = _rows(head, "StackFrames")
        # Newer compilers write the number of a parent plus one: the first frame has none.
        first = self._frames.get(1, {})
        self._offset = 1 if first.get("parent_frame_id") == 1 else 0
        self._finder = Finder()

    def of(self, instruction: Instruction) -> InstructionOrigin:
        """Find where an instruction comes from."""
        metadata = instruction.attributes.get("metadata", "")
        name = _OP_NAME.search(metadata)
        return InstructionOrigin(_OURS.sub("", name[1]) if name else "", self._source(metadata))

    def _source(self, metadata: str) -> str:
        # Older compilers write file and line into every instruction, newer ones a number of a
        # table.
        inline = _FILE.search(metadata)
        if inline:
            frames = [Frame(inline[1], int(inline[2] or 0), "")]
        else:
            number = _FRAME.search(metadata)
            frames = self._stack(int(number[1])) if number else []
        found = self._finder.choose(frames)
        return found.short if found.file else ""

    def _stack(self, number: int) -> list[Frame]:
        """The frames of a call, innermost first."""
        stack: list[Frame] = []
        # The limit ends the walk if a damaged table has a circle.
        while number in self._frames and len(stack) < len(self._frames):
            frame = self._frames[number]
            location = self._locations.get(frame.get("file_location_id", 0), {})
            file = self._files.get(location.get("file_name_id", 0), "")
            function = self._functions.get(location.get("function_name_id", 0), "")
            stack.append(Frame(file, location.get("line", 0), function))
            number = frame.get("parent_frame_id", 0) - self._offset
        return stack


def _section(head: str, title: str) -> str:
    """The lines below a title, up to the next empty one."""
    start = head.find(f"\n{title}\n")
    return "" if start < 0 else head[start + len(title) + 2 :].partition("\n\n")[0]


def _names(head: str, title: str) -> dict[int, str]:
    return {int(number): name for number, name in _NAMES.findall(_section(head, title))}


def _rows(head: str, title: str) -> dict[int, dict[str, int]]:
    return {
        int(number): {key: int(value) for key, value in _FIELDS.findall(fields)}
        for number, fields in _ROWS.findall(_section(head, title))
    }
