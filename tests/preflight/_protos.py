"""Change a message field by field: programs that no compiler writes."""

from collections.abc import Callable, Iterator

Field = tuple[int, int | bytes]


def varint(value: int) -> bytes:
    """An integer as messages write it; negative ones as 64 bits."""
    value %= 2**64
    groups = [value & 0x7F]
    while value := value >> 7:
        groups.append(value & 0x7F)
    return bytes([*(group | 0x80 for group in groups[:-1]), groups[-1]])


def message(*fields: Field) -> bytes:
    """A message out of its fields: integers, and runs of bytes, which may be messages."""
    return b"".join(
        varint(number << 3) + varint(value)
        if isinstance(value, int)
        else varint(number << 3 | 2) + varint(len(value)) + value
        for number, value in fields
    )


def fields(data: bytes) -> Iterator[Field]:
    """The fields of a message, in order. Fixed numbers are not in the messages of these tests."""
    at = 0

    def read() -> int:
        nonlocal at
        value = shift = 0
        while True:
            at, byte = at + 1, data[at]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = read()
        assert key & 7 in (0, 2), key
        value: int | bytes = read()
        if key & 7:
            length, value = value, data[at : at + value]
            at += length
        yield key >> 3, value


def without(number: int) -> Callable[[bytes], bytes]:
    """A change that leaves out a field."""
    return lambda data: message(*(field for field in fields(data) if field[0] != number))


def put(*new: Field) -> Callable[[bytes], bytes]:
    """A change that replaces fields."""

    def change(data: bytes) -> bytes:
        given = {number for number, _ in new}
        return message(*(field for field in fields(data) if field[0] not in given), *new)

    return change


def changed(program: bytes, name: str, change: Callable[[bytes], bytes]) -> bytes:
    """A program with one instruction changed, wherever it is."""

    def computation(data: bytes) -> bytes:
        return message(
            *(
                (2, change(value))
                if number == 2 and isinstance(value, bytes) and (1, name.encode()) in fields(value)
                else (number, value)
                for number, value in fields(data)
            )
        )

    return message(
        *(
            (3, computation(value)) if number == 3 and isinstance(value, bytes) else (number, value)
            for number, value in fields(program)
        )
    )
