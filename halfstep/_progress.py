"""A progress bar, where tqdm is installed."""

from types import TracebackType
from typing import Any


class Progress:
    """Counts compiles on standard error; nothing at all without tqdm."""

    def __init__(self, total: int | None, *, show: bool):
        self._bar: Any = None
        if show:
            try:
                from tqdm.auto import tqdm
            except ModuleNotFoundError:
                return
            self._bar = tqdm(total=total, unit="compile", leave=False)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, what: str) -> None:
        """Say what is being compiled."""
        if self._bar is not None:
            # As it is: tqdm would write a second colon where it has no total.
            self._bar.set_description_str(what)

    def done(self) -> None:
        """Count one compile."""
        if self._bar is not None:
            self._bar.update()
