"""Save the state of a data iterator as JSON: Grain's, and any with `get_state` and `set_state`."""

from typing import Any, Protocol, runtime_checkable

from halfstep.integrations._orbax._json_values import decoded, encoded


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
    """Return an iterator's place, as JSON can hold it.

    Raises:
        CheckpointError: If it would not come back as it is.
    """
    return encoded(data.get_state(), "the state of `data`")


def set_state(data: Iterator, saved: object) -> None:
    """Let an iterator go where it was.

    Raises:
        DamagedFolderError: If what was saved is not the state of an iterator.
    """
    data.set_state(decoded(saved, "the state of the data iterator"))
