"""Save the state of a data iterator as JSON: Grain's, and any with `get_state` and `set_state`."""

import base64
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Iterator(Protocol):
    """What knows where it is in the data."""

    def get_state(self) -> Any:
        """Where it is: bytes, or what JSON can hold."""
        ...

    def set_state(self, state: Any, /) -> Any:
        """Go where that was."""
        ...


def state_of(data: Iterator) -> Any:
    """Return an iterator's place, as JSON can hold it."""
    return _encoded(data.get_state())


def set_state(data: Iterator, saved: object) -> None:
    """Let an iterator go where it was."""
    data.set_state(_decoded(saved))


def _encoded(state: object) -> Any:
    if isinstance(state, bytes):
        return {"base64": base64.b64encode(state).decode()}
    if isinstance(state, dict):
        # Wrapped, so that a dictionary of the user with the key "base64" is not taken for bytes.
        return {"dict": {str(name): _encoded(value) for name, value in state.items()}}
    if isinstance(state, list | tuple):
        return [_encoded(value) for value in state]
    return state.item() if isinstance(state, np.generic) else state


def _decoded(saved: object) -> Any:
    if isinstance(saved, list):
        return [_decoded(value) for value in saved]
    if isinstance(saved, dict):
        if "base64" in saved:
            return base64.b64decode(saved["base64"])
        return {name: _decoded(value) for name, value in saved["dict"].items()}
    return saved
