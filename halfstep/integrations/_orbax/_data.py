"""Save the state of a data iterator as JSON: Grain's, and any with `get_state` and `set_state`."""

from typing import Any, Protocol, runtime_checkable

from halfstep.integrations._orbax._json_values import decoded, encoded


@runtime_checkable
class Iterator(Protocol):
    """An iterator that knows its place in the data."""

    def get_state(self) -> Any:
        """Return the place in the data: bytes, or a value that JSON can hold."""
        ...

    def set_state(self, state: Any, /) -> Any:
        """Go to a place that `get_state` returned."""
        ...


def state_of(data: Iterator) -> Any:
    """Return an iterator's place in a form that JSON can hold.

    Raises:
        CheckpointError: If the place would not be restored exactly.
    """
    return encoded(data.get_state(), "the state of `data`")


def set_state(data: Iterator, saved: object) -> None:
    """Move an iterator to its saved place.

    Raises:
        DamagedFolderError: If the saved value is not the state of an iterator.
    """
    data.set_state(decoded(saved, "the state of the data iterator"))
