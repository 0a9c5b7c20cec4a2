"""Read protocol buffers without their schema: the wire format of XLA's own files.

No package that halfstep or JAX installs has the schema of XLA's messages. The wire format below the
schema is small and does not change. A message is a sequence of numbered fields. A field is an
integer or a run of bytes, which is a string, another message, or integers one after the other.
"""

from collections.abc import Iterator, Sequence
from types import MappingProxyType

_VARINT, _BYTES = 0, 2
# The kinds of fields that are runs of bytes; the length of `_BYTES` is before the run.
_LENGTHS = MappingProxyType({1: 8, _BYTES: 0, 5: 4})


class Message:
    """The fields of a message by number. An absent field has the default of its type."""

    __slots__ = ("_fields",)

    def __init__(self, data: bytes):
        """Read the fields; nested messages are read when they are asked for.

        Raises:
            ValueError: If the bytes are not a message, or not a whole one.
        """
        self._fields: dict[int, list[int | bytes]] = {}
        at, end = 0, len(data)
        while at < end:
            key, at = _varint(data, at)
            kind = key & 7
            if kind == _VARINT:
                value, at = _varint(data, at)
            elif kind in _LENGTHS:
                length, at = _varint(data, at) if kind == _BYTES else (_LENGTHS[kind], at)
                left = end - at
                if length > left:
                    raise ValueError(f"{length} bytes are expected at {at}, and {left} are left")
                value = data[at : at + length]
                at += length
            else:
                raise ValueError(f"byte {at} is not the start of a protocol buffer's field")
            self._fields.setdefault(key >> 3, []).append(value)

    def integer(self, number: int) -> int:
        """Return an integer, an enumeration or a boolean; the last one of a repeated field."""
        values = [v for v in self._fields.get(number, ()) if isinstance(v, int)]
        return _signed(values[-1]) if values else 0

    def integers(self, number: int) -> tuple[int, ...]:
        """Return repeated integers, packed or not."""
        found: list[int] = []
        for value in self._fields.get(number, ()):
            found += [value] if isinstance(value, int) else _packed(value)
        return tuple(map(_signed, found))

    def raw(self, number: int) -> bytes:
        """Return the bytes of a field; the last ones of a repeated field."""
        values = self.runs(number)
        return values[-1] if values else b""

    def text(self, number: int) -> str:
        """Return a string."""
        return self.raw(number).decode("utf-8", "replace")

    def texts(self, number: int) -> tuple[str, ...]:
        """Return repeated strings."""
        return tuple(value.decode("utf-8", "replace") for value in self.runs(number))

    def message(self, number: int) -> "Message":
        """Return a nested message."""
        return Message(self.raw(number))

    def messages(self, number: int) -> Iterator["Message"]:
        """Return repeated nested messages."""
        return (Message(value) for value in self.runs(number))

    def has(self, number: int) -> bool:
        """Return whether a field is present."""
        return number in self._fields

    def runs(self, number: int) -> Sequence[bytes]:
        """Return the bytes of a repeated field."""
        return [v for v in self._fields.get(number, ()) if isinstance(v, bytes)]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read an integer in groups of seven bits, the lowest first; return it and where it ends."""
    # Most integers are a single byte, and a program has millions of them.
    if at < len(data) and data[at] < 0x80:
        return data[at], at + 1
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError(f"an integer is cut off, or has more than 64 bits, at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _signed(value: int) -> int:
    """Return an integer as XLA's messages mean it: negative ones have their highest bit set."""
    return value - 2**64 if value >> 63 else value


def _packed(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        value, at = _varint(data, at)
        found.append(value)
    return found
