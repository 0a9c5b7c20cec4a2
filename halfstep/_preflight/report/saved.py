"""Read reports that were saved as JSON.

A saved report can come from another version of halfstep, from another machine, or from a mistyped
name. Every value is checked before anything is computed from it, and each mistake has one message.
"""

import dataclasses
import json
import os
import pathlib
import reprlib
import types
import typing
from collections.abc import Mapping
from typing import Any

from halfstep._preflight.preflight_errors import PreflightError
from halfstep._preflight.report.preflight_entry import PreflightEntry

LIMIT = 64 * 2**20
"""The most bytes that are read. A report of a thousand distinct products has less than 1 MB."""

# No device has this much of anything, and much larger integers cannot be shown as floats.
_LARGEST = 2**100
# Fields that a report by an older halfstep can lack.
_MAY_BE_ABSENT: Mapping[str, Any] = types.MappingProxyType(
    {"estimates": {}, "versions": {}, "uncounted": (), "notes": (), "hlo": ""}
)


def load(path: str | os.PathLike[str]) -> tuple[PreflightEntry, ...]:
    """Read the entries of a report that `PreflightReport.to_json` or `--json` has written."""
    name = os.fspath(path)
    try:
        with pathlib.Path(path).open("rb") as file:
            # One byte more than allowed shows that a file is too large, without reading all of it.
            read = file.read(LIMIT + 1)
    except OSError as error:
        raise PreflightError(
            f"cannot read the report {name!r}: {error.strerror or error}. Give a file that "
            "report.to_json(path) or halfstep preflight --json FILE has written."
        ) from error
    return _Reader(name).entries(read)


class _Reader:
    """Checks the values that are read, and says where something is wrong."""

    def __init__(self, name: str):
        self.name = name

    def entries(self, read: bytes) -> tuple[PreflightEntry, ...]:
        if len(read) > LIMIT:
            raise _refused(self.name, f"it has more than {LIMIT // 2**20} MiB")
        try:
            found = json.loads(read)
        except (ValueError, RecursionError) as error:
            raise _refused(self.name, f"it is not JSON ({error})") from error
        entries = found.get("entries") if isinstance(found, dict) else None
        if not isinstance(entries, list) or not entries:
            raise _refused(
                self.name,
                f'it has no list "entries" with an entry in it; it holds {reprlib.repr(found)}',
            )
        return tuple(
            self.record(entry, PreflightEntry, f"entries[{number}]")
            for number, entry in enumerate(entries)
        )

    def record(self, value: object, kind: type[Any], where: str) -> Any:
        """Make a dataclass from a mapping. Fields that this version does not know are left out."""
        if not isinstance(value, dict):
            raise self.misfit(where, "an object", value)
        # The annotations of the dataclasses are the schema, so that a new field needs no reader.
        hints = typing.get_type_hints(kind)
        made: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            hint = hints[field.name]
            if field.name in value:
                made[field.name] = self.decoded(value[field.name], hint, f"{where}.{field.name}")
            # Older reports can lack a field that may be `None`.
            elif type(None) in typing.get_args(hint):
                made[field.name] = None
            elif field.name in _MAY_BE_ABSENT:
                made[field.name] = _MAY_BE_ABSENT[field.name]
            elif field.default is dataclasses.MISSING:
                raise _refused(self.name, f"{where} has no {field.name!r}")
        return kind(**made)

    def decoded(self, value: object, hint: object, where: str) -> Any:
        """Decode a value by the annotation of its field."""
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin is types.UnionType or origin is typing.Union:
            if value is None:
                return None
            # Unions are of one type and `None`; other unions would not say how to read a value.
            (hint,) = (one for one in inner if one is not type(None))
            return self.decoded(value, hint, where)
        if origin is tuple:
            return self.sequence(value, inner, where)
        if origin is Mapping:
            if not isinstance(value, dict):
                raise self.misfit(where, "an object", value)
            return {
                key: self.decoded(one, inner[1], f"{where}.{key}") for key, one in value.items()
            }
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.record(value, hint, where)
        return self.scalar(value, hint, where)

    def sequence(self, value: object, inner: tuple[Any, ...], where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise self.misfit(where, "a list", value)
        if inner[-1] is Ellipsis:
            inner = (inner[0],) * len(value)
        if len(inner) != len(value):
            raise self.misfit(where, f"a list of {len(inner)}", value)
        return tuple(
            self.decoded(one, hint, f"{where}[{number}]")
            for number, (one, hint) in enumerate(zip(value, inner, strict=True))
        )

    def scalar(self, value: object, hint: object, where: str) -> str | int | float:
        if hint is str or hint is bool:
            if not isinstance(value, str if hint is str else bool):
                raise self.misfit(where, "text" if hint is str else "true or false", value)
            return value
        # In Python `True` is an integer; in a report it is a mistake.
        allowed = int if hint is int else int | float
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise self.misfit(where, "a number" if hint is float else "an integer", value)
        # Python's JSON has NaN and Infinity, too; neither is less than a finite number.
        if not abs(value) < _LARGEST:
            raise self.misfit(where, "a finite number below 2**100", value)
        return value

    def misfit(self, where: str, required: str, value: object) -> PreflightError:
        got = f"{type(value).__name__} {reprlib.repr(value)}"
        return _refused(self.name, f"{where} must be {required}; got {got}")


def _refused(name: str, why: str) -> PreflightError:
    return PreflightError(
        f"{name!r} is not a preflight report: {why}. Give a file that report.to_json(path) or "
        "halfstep preflight --json FILE has written."
    )
