"""Read XLA's optimized HLO text: computations, instructions, shapes and attributes.

The parser reads the output of `compiled.as_text()` for the CPU, GPU and TPU compilers. Every
instruction line becomes an `Instruction`; a line that looks like an instruction and cannot be read
raises. Shapes, operands and attributes are parsed on first use, so syntax that no count depends on
does no harm.
"""

# The errors here are about text that XLA's compilers write: no user can cause or fix them.

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

# HLO's name of an element type: (the name NumPy or ml_dtypes gives it, bits per element).
_DTYPES: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "pred": ("bool", 8),
        **{f"s{bits}": (f"int{bits}", bits) for bits in (1, 2, 4, 8, 16, 32, 64)},
        **{f"u{bits}": (f"uint{bits}", bits) for bits in (1, 2, 4, 8, 16, 32, 64)},
        "f16": ("float16", 16),
        "bf16": ("bfloat16", 16),
        "f32": ("float32", 32),
        "f64": ("float64", 64),
        "c64": ("complex64", 64),
        "c128": ("complex128", 128),
        "f4e2m1fn": ("float4_e2m1fn", 4),
        "f8e3m4": ("float8_e3m4", 8),
        "f8e4m3": ("float8_e4m3", 8),
        "f8e4m3b11fnuz": ("float8_e4m3b11fnuz", 8),
        "f8e4m3fn": ("float8_e4m3fn", 8),
        "f8e4m3fnuz": ("float8_e4m3fnuz", 8),
        "f8e5m2": ("float8_e5m2", 8),
        "f8e5m2fnuz": ("float8_e5m2fnuz", 8),
        "f8e8m0fnu": ("float8_e8m0fnu", 8),
        "token": ("token", 0),
        "opaque": ("opaque", 0),
    }
)

# Regular expressions and a scanner of brackets instead of a grammar: every release of XLA adds
# attributes that mostly do not matter here, and the text of a large model is long.
_HEADER = re.compile(r"(ENTRY )?%?([^\s(]+) (?:\(.*)?\{$")
_START = re.compile(r"\s*(?:ROOT )?%?[^\s=,(){}]+ = ")
_INSTRUCTION = re.compile(
    r"\s*(ROOT )?%?([^\s=,(){}]+) = (\(.*?\)|[^\s(]\S*) ([a-z][a-z0-9-]*)\(", re.DOTALL
)
# A dimension may be bounded, `<=8`; a layout may follow, `{1,0:T(8,128)S(1)}`.
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[((?:(?:<=)?\d+,?)*)\](?:\{([^{}]*)\})?")
_NUMBER = re.compile(r"\d+")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([^\s,()]+)")
_COMMENT = re.compile(r"/\*.*?\*/")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}()\[\],]|[^"{}()\[\],]+', re.DOTALL)
# Only layouts of XLA:TPU are tiled, `{1,0:T(8,128)}`. A tiled layout shows which compiler wrote a
# text, and so what its memory spaces mean.
_TILING = re.compile(r"\{[\d,]*:[^}\s]*T\(\d")

# Both compilers put buffers of the host into this memory space.
_HOST = 5


class UnknownTypeError(ValueError):
    """The bytes of an array are needed, but its element type is not known."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array's shape.

    Attributes:
        dtype: The element type as NumPy or ml_dtypes name it, such as `bfloat16`.
        dims: The dimensions; for a bounded dynamic dimension, the bound.
        bits: Bits per element when packed; `None` for an unknown type.
        space: The memory space `S(n)` of its layout; 0 is the device's main memory.
        in_memory: Whether it lives in the device's main memory. XLA:TPU's other spaces are on chip
            or on the host; XLA:GPU's only other place is the host (its space 1 is main memory).
    """

    dtype: str
    dims: tuple[int, ...]
    bits: int | None
    space: int
    in_memory: bool

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Logical bytes: elements times item size, sub-byte types packed, tile padding left out."""
        return self.bytes_of(self.size)

    def bytes_of(self, elements: int) -> int:
        """Return the bytes of some of its elements."""
        if self.bits is None:
            raise UnknownTypeError(f"an element type whose size is known, not `{self.dtype}`,")
        return -(-elements * self.bits // 8)


@dataclass(frozen=True, slots=True)
class Tuple:
    """A tuple's shape."""

    elements: tuple["Array | Tuple", ...]


Shape = Array | Tuple


def leaves(shape: Shape) -> Iterator[Array]:
    """Yield the arrays of a shape, in order."""
    if isinstance(shape, Array):
        yield shape
    else:
        for element in shape.elements:
            yield from leaves(element)


class _Shapes:
    """Parses shapes; equal texts are parsed once."""

    def __init__(self, *, tiled: bool):
        self.tiled = tiled
        self.seen: dict[str, Shape] = {}

    def parse(self, text: str) -> Shape:
        if text not in self.seen:
            self.seen[text] = self._tuple(text) if text.startswith("(") else self._array(text)
        return self.seen[text]

    def _tuple(self, text: str) -> Tuple:
        inner = _COMMENT.sub("", text[1:-1])
        return Tuple(tuple(self.parse(part.strip()) for part in split(inner) if part.strip()))

    def _array(self, text: str) -> Array:
        # A buffer, `b(f32[8])`, has the bytes of the array that it holds.
        bare = text[2:-1] if text.startswith("b(") else text
        match = _ARRAY.fullmatch(bare)
        if not match:
            raise ValueError(f"a shape, not `{text[:80]}`,")
        dtype, bits = _DTYPES.get(match[1], (match[1], None))
        dims = tuple(int(size) for size in _NUMBER.findall(match[2]))
        space = _SPACE.search(match[3] or "")
        number = int(space[1]) if space else 0
        return Array(dtype, dims, bits, number, number == 0 or (number != _HOST and not self.tiled))


def split(text: str) -> Iterator[str]:
    """Split at commas that are not inside brackets or quotes."""
    depth, parts = 0, []
    for token in _TOKEN.findall(text):
        if token in "{([":
            depth += 1
        elif token in "})]":
            depth -= 1
        elif token == "," and depth == 0:
            yield "".join(parts)
            parts = []
            continue
        parts.append(token)
    yield "".join(parts)


def _closing(text: str, start: int) -> int:
    """Find where the parenthesis that was opened before `start` closes; -1 if nowhere."""
    # Most instructions have no bracket inside their parentheses, and are not scanned token by
    # token.
    end = text.find(")", start)
    if end >= 0 and text.find("(", start, end) < 0 and text.find('"', start, end) < 0:
        return end
    depth, position = 1, start
    for token in _TOKEN.finditer(text, start):
        if token[0] in "{([":
            depth += 1
        elif token[0] in "})]":
            depth -= 1
            if depth == 0:
                position = token.start()
                return position
    return -1


@dataclass(eq=False)
class Instruction:
    """One instruction; everything but its name and opcode is parsed on first use.

    Attributes:
        name: Its name, without `%`.
        opcode: As printed, such as `dot` or `all-gather-start`.
        line: The number of its line in the text, from 1.
        arguments: The text between its parentheses: operands, or a literal.
        base: The opcode without the `-start` of its asynchronous form.
    """

    name: str
    opcode: str
    line: int
    arguments: str
    _shape: str = field(repr=False)
    _attributes: str = field(repr=False)
    _shapes: _Shapes = field(repr=False)
    base: str = field(init=False, repr=False)

    # `base` is computed here and not on first use: it is read several times for every instruction.
    def __post_init__(self) -> None:
        self.base = self.opcode.removesuffix("-start")

    @cached_property
    def shape(self) -> Shape:
        """The shape of the value, a tuple for `-start` forms."""
        try:
            return self._shapes.parse(self._shape)
        except ValueError as error:
            raise self.error(f"{error}") from None

    @cached_property
    def results(self) -> tuple[Array, ...]:
        """The arrays the operation produces; for a `-start` form without operands and context."""
        shape = self.shape
        if self.opcode.endswith("-start") and isinstance(shape, Tuple):
            # copy-start is (destination, source, context), and the others are (operands, results,
            # context...). all-reduce-start was only the results before the XLA of JAX 0.12, which
            # writes the operands as a tuple even if there is only one.
            parts = shape.elements
            alone = self.opcode == "all-reduce-start" and not any(
                isinstance(part, Tuple) for part in parts
            )
            if self.opcode == "copy-start" and parts:
                shape = parts[0]
            elif not alone:
                if len(parts) < 2:
                    raise self.error(
                        f"operands and results in the shape of a {self.opcode}, not {shape}"
                    )
                shape = parts[1]
        return tuple(leaves(shape))

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        # These have literals and numbers between their parentheses, not names.
        if self.opcode in ("constant", "parameter", "iota"):
            return ()
        # The compilers print names with `%`, which can be found without splitting.
        names = tuple(_NAME.findall(self.arguments))
        if names or not self.arguments.strip():
            return names
        # Names may be printed without `%`, and after the operand's shape if the shape is printed.
        parts = split(_COMMENT.sub("", self.arguments))
        return tuple(part.split()[-1] for part in parts if part.strip())

    @cached_property
    def attributes(self) -> dict[str, str]:
        """The `key=value` pairs after the operands, values as printed."""
        found = {}
        for part in split(self._attributes):
            key, equals, value = part.strip().partition("=")
            if equals:
                found[key] = value
        return found

    def error(self, expected: str) -> ValueError:
        """Create an error that names the line."""
        return ValueError(
            f"line {self.line} of the HLO text cannot be counted: expected {expected} in "
            f"`{self.name} = {self._shape[:80]} {self.opcode}(...)`. The text may be of a compiler "
            "whose format is not known here; please report it with the line."
        )

    def text(self, key: str, default: str | None = None) -> str:
        """Return an attribute as printed; raise if it is required and missing."""
        value = self.attributes.get(key, default)
        if value is None:
            raise self.error(f"an attribute `{key}=`")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """List the computations an attribute names: `calls=%f`, `branch_computations={%a, %b}`."""
        value = self.attributes.get(key)
        if value is None:
            return ()
        return tuple(name.strip().lstrip("%") for name in value.strip("{} ").split(","))

    def integers(self, key: str, default: str | None = None) -> tuple[int, ...]:
        """Return the integers of an attribute: `dimensions={0,2}`, `index=1`."""
        value = self.text(key, default).strip("{} ")
        try:
            return tuple(int(number) for number in value.split(",") if number.strip())
        except ValueError:
            raise self.error(f"integers in `{key}={value[:40]}`") from None


@dataclass(eq=False)
class Computation:
    """A named computation: its instructions by name, in schedule order, and its root."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: Instruction | None = None

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @property
    def result(self) -> Instruction:
        """The root; raises if it is missing."""
        if self.root is None:
            raise ValueError(
                f"the computation `{self.name}` of the HLO text has no ROOT instruction."
            )
        return self.root

    def __getitem__(self, name: str) -> Instruction:
        if name not in self.instructions:
            raise ValueError(
                f"computation `{self.name}` of the HLO text uses `{name}` and does not define it."
            )
        return self.instructions[name]

    def operand(self, instruction: Instruction, index: int) -> Instruction:
        """Return the instruction that is an operand of another."""
        if index >= len(instruction.operands):
            raise instruction.error(f"{index + 1} operands or more")
        return self[instruction.operands[index]]

    def shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Return the shapes of an instruction's operands."""
        return tuple(self.operand(instruction, i).shape for i in range(len(instruction.operands)))

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by number."""
        return {int(i.arguments): i for i in self if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[tuple[Instruction, int]]]:
        """The users of each instruction, and as which operand they use it."""
        found: dict[str, list[tuple[Instruction, int]]] = {name: [] for name in self.instructions}
        for instruction in self:
            for index, name in enumerate(instruction.operands):
                found.setdefault(name, []).append((instruction, index))
        return found


@dataclass(eq=False)
class Module:
    """A parsed program: its computations by name, and the one that runs."""

    computations: dict[str, Computation]
    entry: Computation

    def called(self, instruction: Instruction, *keys: str) -> tuple[Computation, ...]:
        """Return the computations that the attributes `keys` name; raise if there are none."""
        names = [name for key in keys for name in instruction.names(key)]
        if not names or any(name not in self.computations for name in names):
            raise instruction.error(
                " or ".join(f"`{key}=`" for key in keys) + " with a computation"
            )
        return tuple(self.computations[name] for name in names)


def parse(text: str) -> Module:
    """Parse an optimized HLO module.

    Args:
        text: The text of one module, as `compiled.as_text()` returns it.

    Returns:
        The module.

    Raises:
        ValueError: If the text has no entry computation or several, or a line cannot be read.
    """
    shapes = _Shapes(tiled=_TILING.search(text) is not None)
    computations: dict[str, Computation] = {}
    entry, current = None, None
    pending, first = "", 0

    def close() -> None:
        nonlocal pending
        if pending and current is not None:
            _add(current, pending, first, shapes)
        pending = ""

    for number, line in enumerate(text.splitlines(), start=1):
        if current is None:
            header = _HEADER.match(line)
            if header:
                current = Computation(header[2])
                computations[current.name] = current
                if header[1]:
                    if entry is not None:
                        raise ValueError(
                            "expected the HLO text of one module; got several ENTRY computations, "
                            f"`{entry.name}` and `{current.name}`."
                        )
                    entry = current
            elif _START.match(line):
                raise ValueError(f"line {number} of the HLO text is outside any computation.")
        elif _START.match(line):
            close()
            pending, first = line, number
        elif line.startswith("}"):
            close()
            current = None
        elif line.strip():
            # Only a long literal can span several lines.
            match = _INSTRUCTION.match(pending)
            if not match or _closing(pending, match.end()) >= 0:
                raise ValueError(
                    f"line {number} of the HLO text is not an instruction: `{line.strip()[:120]}`."
                )
            pending += "\n" + line
    if entry is None or current is not None:
        raise ValueError(
            "expected the HLO text of a compiled program with an ENTRY computation, such as "
            f"`compiled.as_text()` returns; got {len(text)} characters without a whole one."
        )
    return Module(computations, entry)


def _add(computation: Computation, text: str, line: int, shapes: _Shapes) -> None:
    """Add the instruction on a line to its computation."""
    match = _INSTRUCTION.match(text)
    end = _closing(text, match.end()) if match else -1
    if not match or end < 0:
        raise ValueError(
            f"line {line} of the HLO text is not an instruction: `{text.strip()[:120]}`."
        )
    instruction = Instruction(
        name=match[2],
        opcode=match[4],
        line=line,
        arguments=text[match.end() : end],
        _shape=match[3],
        _attributes=text[end + 1 :],
        _shapes=shapes,
    )
    computation.instructions[instruction.name] = instruction
    if match[1]:
        computation.root = instruction
