"""Read the shapes of an HLO program's values, XLA's `ShapeProto`."""

# The errors here are about programs that XLA's compilers write: no user can cause or fix them.

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from halfstep._preflight.hlo.wire import Message

# `xla.PrimitiveType`, by the names that NumPy or ml_dtypes gives its members.
DTYPES: Mapping[int, str] = MappingProxyType(
    {
        1: "bool",
        **dict(zip(range(2, 6), ("int8", "int16", "int32", "int64"), strict=True)),
        **dict(zip(range(6, 10), ("uint8", "uint16", "uint32", "uint64"), strict=True)),
        **{10: "float16", 11: "float32", 12: "float64", 15: "complex64", 16: "bfloat16"},
        **{18: "complex128", 19: "float8_e5m2", 20: "float8_e4m3fn", 21: "int4", 22: "uint4"},
        **{23: "float8_e4m3b11fnuz", 24: "float8_e5m2fnuz", 25: "float8_e4m3fnuz", 26: "int2"},
        **{27: "uint2", 28: "float8_e4m3", 29: "float8_e3m4", 30: "int1", 31: "uint1"},
        **{32: "float4_e2m1fn", 33: "float8_e8m0fnu"},
    }
)
_TUPLE, _BUFFER = 13, 34
# Types of values without elements: name and bits.
_EMPTY: Mapping[int, tuple[str, int]] = MappingProxyType({14: ("opaque", 0), 17: ("token", 0)})

# Both compilers put buffers of the host into this memory space.
_HOST = 5
# Limits that end the reading of a damaged program: no real one comes near them.
_MOST_DIMS, _MOST_NESTED = 64, 64


class UnknownTypeError(ValueError):
    """The bytes of an array are needed, but its element type is not known."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array's shape.

    Attributes:
        dtype: The element type as NumPy or ml_dtypes name it, such as `bfloat16`.
        dims: The dimensions; for a bounded dynamic dimension, the bound.
        bits: Bits per element when packed; `None` for an unknown type.
        space: The memory space of its layout; 0 is the device's main memory.
        in_memory: Whether it lives in the device's main memory. XLA:TPU's other spaces are on chip
            or on the host; XLA:GPU's only other place is the host (its space 1 is main memory).
    """

    dtype: str
    dims: tuple[int, ...]
    bits: int | None
    space: int
    in_memory: bool

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

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
            raise UnknownTypeError(f"an element type whose size is known, not `{self.dtype}`")
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


class Shapes:
    """Reads the shapes of one program; equal ones are read once.

    Attributes:
        every: The shapes of all instructions, which show the compiler that wrote the program.
    """

    def __init__(self) -> None:
        self.every: list[bytes] = []
        self._seen: dict[bytes, Shape] = {}

    def read(self, data: bytes, depth: int = 0) -> Shape:
        """Read a shape.

        Raises:
            ValueError: If the bytes are not a shape, or not one that a program can have.
        """
        if data not in self._seen:
            if depth > _MOST_NESTED:
                raise ValueError(f"tuples that are nested {_MOST_NESTED} times at most")
            self._seen[data] = self._read(Message(data), depth)
        return self._seen[data]

    def _read(self, shape: Message, depth: int) -> Shape:
        kind = shape.integer(2)
        inner = tuple(self.read(element, depth + 1) for element in shape.runs(4))
        if kind == _TUPLE:
            return Tuple(inner)
        # A buffer has the bytes of the array that it holds.
        if kind == _BUFFER and inner:
            return inner[0]
        dims = shape.integers(3)
        if len(dims) > _MOST_DIMS or any(size < 0 for size in dims):
            raise ValueError(f"at most {_MOST_DIMS} dimensions of known sizes, not {dims[:8]}")
        name = DTYPES.get(kind)
        dtype, bits = _EMPTY.get(kind, (f"type {kind}", None)) if name is None else (name, 8)
        sized = re.search(r"\d+", name or "")
        space = shape.message(5).integer(8)
        return Array(
            dtype,
            dims,
            int(sized[0]) if sized else bits,
            space,
            space == 0 or (space != _HOST and not self._tiled),
        )

    @cached_property
    def _tiled(self) -> bool:
        """Whether XLA:TPU wrote the program, and so what its memory spaces mean.

        Only its layouts are tiled.
        """
        return any(_is_tiled(data, 0) for data in self.every)


def _is_tiled(data: bytes, depth: int) -> bool:
    shape = Message(data)
    if shape.message(5).has(6):
        return True
    inner = shape.runs(4) if depth < _MOST_NESTED else ()
    return any(_is_tiled(element, depth + 1) for element in inner)
