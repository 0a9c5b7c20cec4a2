"""Write the live view as a line, a table and HTML, and keep its line on the screen."""

import abc
import contextlib
import html as escaping
import math
from collections.abc import Generator, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from halfstep._base import ABSENT, aligned, html_table, percent
from halfstep.debug._instrument.site import Site
from halfstep.debug._live.history import (
    IN_A_ROW,
    KNOWN,
    LOSS,
    OVERFLOW,
    SCALE,
    SKIPPED,
    UNDERFLOW,
    History,
    Part,
)
from halfstep.debug._live.read import Shares, Worst

Style = Literal["tqdm", "rich"]
_HEADINGS = ("", "now", "lowest", "highest", "not finite")


def _power(value: float) -> str:
    """Format a loss scale, such as `2^15`."""
    if value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5:
        return f"2^{math.frexp(value)[1] - 1}"
    return f"{value:g}"


def _shown(name: str, value: float) -> str:
    """Format a number according to its name."""
    if not math.isfinite(value):
        return str(value)
    if name == SCALE:
        return _power(value)
    if name in (SKIPPED, IN_A_ROW):
        return f"{value:.0f}"
    return percent(value) if name in (UNDERFLOW, OVERFLOW) else f"{value:.3g}"


def _place(site: Site) -> str:
    """Return the place of a site in a few characters, such as `train.py:12`."""
    return site.path or site.source.short


def line_of(latest: Mapping[str, float], shares: Shares | None, name_above: float) -> str:
    """Write the newest values on one line; name a site if it loses more than `name_above`."""
    parts = []
    for name, title in ((LOSS, "loss"), (SCALE, "scale")):
        if name in latest:
            parts.append(f"{title} {_shown(name, latest[name])}")
    if SKIPPED in latest:
        text = f"skipped {_shown(SKIPPED, latest[SKIPPED])}"
        if IN_A_ROW in latest:
            text += f" ({_shown(IN_A_ROW, latest[IN_A_ROW])} in a row)"
        parts.append(text)
    for name in (UNDERFLOW, OVERFLOW):
        if name in latest:
            text = f"{name} {_shown(name, latest[name])}"
            worst = None if shares is None else getattr(shares, f"most_{name}")
            if worst is not None and worst.share > name_above:
                text += f" ({percent(worst.share)} at {_place(worst.site)})"
            parts.append(text)
    parts += [f"{name} {_shown(name, latest[name])}" for name in latest if name not in KNOWN]
    return " | ".join(parts)


def headline(history: History) -> str:
    """Say which steps the history covers."""
    if not len(history):
        return "nothing was given yet"
    return f"steps {history.steps[0]} to {history.last}, {history.updates} updates"


def table_of(history: History, latest: Mapping[str, float]) -> list[list[str]]:
    """Return a row of the table for each number."""
    known = [name for name in KNOWN if name in history.names]
    made = []
    for name in [*known, *(name for name in history.names if name not in KNOWN)]:
        low, high = history.part(name, Part.LOW).min(), history.part(name, Part.HIGH).max()
        is_any = bool(history.part(name, Part.COUNT).any())
        bad = int(np.sum(history.part(name, Part.BAD)))
        ends = [_shown(name, float(end)) if is_any else ABSENT for end in (low, high)]
        cells = [name.replace("_", " "), _shown(name, latest[name]), *ends]
        made.append([*cells, str(bad) if bad else ABSENT])
    return made


def worst_line(name: str, worst: Worst, step: int) -> str:
    """Say where most was lost."""
    site = worst.site
    return f"Most {name}: {percent(worst.share)} of {site}, {site.pass_name}, in step {step}."


def text_of(head: str, table: list[list[str]], notes: list[str]) -> str:
    """Return the whole view as text."""
    parts = [head]
    if table:
        parts.append(aligned([list(_HEADINGS), *table], [False, *[True] * (len(_HEADINGS) - 1)]))
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def html_of(head: str, table: list[list[str]], notes: list[str]) -> str:
    """Return the whole view as HTML for notebooks; numbers that were not finite are red."""
    parts = [f"<p>{escaping.escape(head)}</p>"]
    if table:
        cells = [[(cell, at > 0) for at, cell in enumerate(row)] for row in table]
        heads = [(name, at > 0) for at, name in enumerate(_HEADINGS)]
        parts.append(html_table(heads, cells, [row[-1] == ABSENT for row in table]))
    parts += [f"<p>{escaping.escape(note)}</p>" for note in notes]
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


class Display(abc.ABC):
    """A line on the screen."""

    @abc.abstractmethod
    def show(self, line: str, *, alarm: bool, draw: bool) -> None:
        """Write a line over the previous one.

        Args:
            line: The new line.
            alarm: Whether something is wrong.
            draw: Whether it is time to write. If not, the line need not become visible.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the last line on the screen."""


@runtime_checkable
class PostfixBar(Protocol):
    """A tqdm bar, or an object with the same method."""

    def set_postfix_str(self, s: str, refresh: bool) -> object:
        """Show text after the bar."""
        ...


class Bar(Display):
    """A line after the user's bar, which the user still owns."""

    def __init__(self, bar: object):
        if not isinstance(bar, PostfixBar):
            raise TypeError(
                "`bar` must be a tqdm bar, or anything with `set_postfix_str(text, refresh)`; got "
                f"{type(bar).__name__}"
            )
        self._bar = bar

    def show(self, line: str, *, alarm: bool, draw: bool) -> None:
        """Pass the line to the bar, which also draws it itself, last at the end of the loop."""
        # Without `refresh`, the bar shows the line when it next draws itself.
        self._bar.set_postfix_str(line, refresh=draw)

    def close(self) -> None:
        """Do nothing: whoever made the bar closes it."""


class Tqdm(Display):
    """A tqdm line without a bar."""

    def __init__(self) -> None:
        with _installed("tqdm"):
            from tqdm.auto import tqdm

            self._bar: Any = tqdm(bar_format="{desc}")

    def show(self, line: str, *, alarm: bool, draw: bool) -> None:
        """Write the line, without color."""
        self._bar.set_description_str(line, refresh=draw)

    def close(self) -> None:
        """Leave the last line on the screen."""
        self._bar.close()


class Rich(Display):
    """A rich line; red if something is wrong."""

    def __init__(self, console: Any = None):
        with _installed("rich"):
            from rich.live import Live
            from rich.text import Text

            self._text: Any = Text
            # Drawn only when there is something new, so it needs no thread.
            self._live: Any = Live(console=console, auto_refresh=False)

    def show(self, line: str, *, alarm: bool, draw: bool) -> None:
        """Write the line, cut off at the width of the screen."""
        if not draw:
            return
        if not self._live.is_started:
            self._live.start()
        style = "bold red" if alarm else ""
        text = self._text(line, style=style, no_wrap=True, overflow="ellipsis")
        self._live.update(text, refresh=True)

    def close(self) -> None:
        """Leave the last line on the screen."""
        if self._live.is_started:
            self._live.stop()
            if not self._live.console.is_terminal:
                # When rich writes to a file, it leaves out the final newline.
                self._live.console.line()


def display(style: Style | None, bar: object) -> Display | None:
    """Create the display that the user asked for, if any."""
    if style not in (None, "tqdm", "rich"):
        raise ValueError(f"`style` must be 'tqdm', 'rich' or None; got {style!r}")
    if bar is not None:
        if style == "rich":
            raise ValueError(
                f"`bar` is a tqdm bar ({type(bar).__name__}), and `style` is {style!r}: leave one "
                "of them out. With bars of rich, leave out both and show `live.line`."
            )
        return Bar(bar)
    if style is None:
        return None
    return Tqdm() if style == "tqdm" else Rich()


@contextlib.contextmanager
def _installed(package: str) -> Generator[None, None, None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'a live line with style="{package}" needs {package}, which is not installed. Install '
            'it with: pip install "halfstep[live]"; or leave `style` out and print `live.line`'
        ) from error
