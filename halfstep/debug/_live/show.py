"""One line that is written over: beside a tqdm bar, or with rich."""

import abc
from typing import Any, Literal

Style = Literal["tqdm", "rich"]


class Display(abc.ABC):
    """A line on the screen."""

    @abc.abstractmethod
    def show(self, line: str, *, alarm: bool, draw: bool) -> None:
        """Write it over the one before.

        Args:
            line: What is new.
            alarm: Whether something is wrong.
            draw: Whether it is time to write. If not, it need not be seen.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the last one there."""


class Bar(Display):
    """Behind the user's bar, which stays theirs."""

    def __init__(self, bar: Any):
        if not hasattr(bar, "set_postfix_str"):
            raise TypeError(
                "`bar` must be a tqdm bar, or anything with `set_postfix_str(text, refresh)`; got "
                f"{type(bar).__name__}"
            )
        self._bar = bar

    def show(self, line: str, *, alarm: bool, draw: bool) -> None:
        """It is drawn by the bar, too, and for the last time at the end of the loop."""
        self._bar.set_postfix_str(line, refresh=draw)

    def close(self) -> None:
        """It is closed by whoever made it."""


class Tqdm(Display):
    """A line of tqdm's, without a bar."""

    def __init__(self) -> None:
        try:
            from tqdm.auto import tqdm
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(_missing("tqdm")) from error
        self._bar: Any = tqdm(bar_format="{desc}")

    def show(self, line: str, *, alarm: bool, draw: bool) -> None:
        """Text has no color here."""
        self._bar.set_description_str(line, refresh=draw)

    def close(self) -> None:
        """Leave the last one there."""
        self._bar.close()


class Rich(Display):
    """A line of rich's; red if something is wrong."""

    def __init__(self, console: Any = None):
        try:
            from rich.live import Live
            from rich.text import Text
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(_missing("rich")) from error
        self._text: Any = Text
        # Drawn when there is something new: no thread.
        self._live: Any = Live(console=console, auto_refresh=False)

    def show(self, line: str, *, alarm: bool, draw: bool) -> None:
        """Cut at the end of the screen's line."""
        if not draw:
            return
        if not self._live.is_started:
            self._live.start()
        style = "bold red" if alarm else ""
        text = self._text(line, style=style, no_wrap=True, overflow="ellipsis")
        self._live.update(text, refresh=True)

    def close(self) -> None:
        """Leave the last one there."""
        if self._live.is_started:
            self._live.stop()
            if not self._live.console.is_terminal:
                # To a file, rich leaves the end of the line out.
                self._live.console.line()


def display(style: Style | None, bar: Any) -> Display | None:
    """What the user asked for."""
    if style not in (None, "tqdm", "rich"):
        raise ValueError(f"`style` must be 'tqdm', 'rich' or None; got {style!r}")
    if bar is not None:
        if style == "rich":
            raise ValueError(
                "`bar` is a tqdm bar, and `style` is 'rich': leave one of them out. With bars of "
                "rich, leave out both and show `live.line`."
            )
        return Bar(bar)
    if style is None:
        return None
    return Tqdm() if style == "tqdm" else Rich()


def _missing(package: str) -> str:
    return (
        f'a live line with style="{package}" needs {package}, which is not installed. Install it '
        'with: pip install "halfstep[live]"; or leave `style` out and print `live.line`'
    )
