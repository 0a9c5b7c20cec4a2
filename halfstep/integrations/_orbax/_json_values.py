"""Write values as JSON so that each is restored exactly, or is refused.

JSON has no tuples, no bytes, no keys except strings, no infinities, and none of NumPy's numbers.
Written as the nearest JSON value, these would be restored changed, and a run would continue from
another state than the one that was saved. They are wrapped in an object with one field instead.
"""

import base64
import math
from typing import Any

import numpy as np

from halfstep._base import DamagedFolderError
from halfstep.integrations._orbax._errors import CheckpointError

_DEPTH = 100
# Python does not read longer integers from text.
_DIGITS = 4000
_NUMPY = "biuf"


def encoded(value: Any, what: str, *, depth: int = _DEPTH) -> Any:
    """Return a value in a form that JSON can hold.

    Args:
        value: None, numbers, strings, bytes, lists, tuples and dictionaries of these.
        what: The name of the value in errors.
        depth: How deep the value may be nested.

    Raises:
        CheckpointError: If the value would not be restored exactly.
    """
    if depth < 0:
        raise CheckpointError(
            f"{what} is nested more than {_DEPTH} deep, or contains itself; use one that is flat."
        )

    def inner(item: Any, place: object) -> Any:
        return encoded(item, f"{what}[{place!r}]", depth=depth - 1)

    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int and abs(value) < 10**_DIGITS:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is complex:
        return {"complex": [inner(value.real, "real"), inner(value.imag, "imag")]}
    if kind is bytes:
        return {"base64": base64.b64encode(value).decode()}
    if kind is list:
        return [inner(item, place) for place, item in enumerate(value)]
    if kind is tuple:
        return {"tuple": [inner(item, place) for place, item in enumerate(value)]}
    if kind is dict:
        if all(type(name) is str for name in value):
            return {"dict": {name: inner(item, name) for name, item in value.items()}}
        return {"items": [[inner(name, name), inner(item, name)] for name, item in value.items()]}
    if isinstance(value, np.generic) and value.dtype.kind in _NUMPY and value.dtype.isbuiltin:
        return {"numpy": [value.dtype.name, inner(value.item(), value.dtype.name)]}
    raise CheckpointError(
        f"{what} is {_named(value)}, which would not come back as it is. Use None, numbers, "
        "texts, bytes, and lists, tuples or dictionaries of these."
    )


def _named(value: Any) -> str:
    if type(value) is int:
        return f"an integer of more than {_DIGITS} digits"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def decoded(saved: Any, what: str) -> Any:
    """Return the value that `encoded` was given.

    Raises:
        DamagedFolderError: If `encoded` cannot have written this.
    """
    try:
        return _decoded(saved)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise DamagedFolderError(f"{what} has something else in it: {error}") from error


def _decoded(saved: Any) -> Any:
    if isinstance(saved, list):
        return [_decoded(item) for item in saved]
    if not isinstance(saved, dict):
        return saved
    ((form, content),) = saved.items()
    if form == "dict" and isinstance(content, dict):
        return {name: _decoded(item) for name, item in content.items()}
    if form == "items":
        return {_decoded(name): _decoded(item) for name, item in content}
    if form == "tuple" and isinstance(content, list):
        return tuple(_decoded(item) for item in content)
    if form == "base64":
        return base64.b64decode(content, validate=True)
    if form == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if form == "complex":
        real, imag = map(_decoded, content)
        return complex(real, imag)
    if form == "numpy":
        name, number = content
        dtype = np.dtype(name)
        if dtype.kind in _NUMPY and dtype.isbuiltin:
            return dtype.type(_decoded(number))
    raise DamagedFolderError(
        f"the form {form!r:.40} ({type(content).__name__}) is not known to this version"
    )
