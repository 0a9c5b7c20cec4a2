"""A policy as a file that people can read and edit: TOML."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

_SEVERAL = ("keep", "rules")


def to_toml(fields: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Fields as the text of a file, each text or a sequence of texts.

    Args:
        fields: What the policy is made of; what is `None` or empty is left out.
        notes: Lines of comment to begin with.
    """
    lines = [f"# {line}".rstrip() for note in notes for line in note.splitlines()]
    for name, value in fields.items():
        if name in _SEVERAL and value:
            # A TOML text in quotes is written as a JSON text is.
            lines += [f"{name} = [", *(f"  {json.dumps(str(item))}," for item in value), "]"]
        elif value:
            lines.append(f"{name} = {json.dumps(str(value))}")
    return "\n".join(lines) + "\n"


def from_toml(text: str, name: str, known: Sequence[str]) -> dict[str, Any]:
    """The fields that a file says.

    Args:
        text: What is in the file.
        name: Of the file, for the error.
        known: The fields that there are.

    Raises:
        ValueError: If it is no such file.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f'{name} is no TOML: {error}. Write lines such as compute = "bf16".'
        ) from error
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(
            f"{name} says {', '.join(map(repr, unknown))}, which no policy has; use "
            f"{', '.join(known)}."
        )
    for field, value in found.items():
        several = field in _SEVERAL
        texts = value if several and isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts) or several != isinstance(value, list):
            form = '["...", "..."]' if several else '"..."'
            raise ValueError(f"{field} in {name} must be written {field} = {form}; got {value!r}.")
    return found
