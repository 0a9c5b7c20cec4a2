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
    """A loss scale: `2^15`."""
    if value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5:
        return f"2^{math.frexp(value)[1] - 1}"
    return f"{value:g}"


def _shown(name: str, value: float) -> str:
    """A number by its name."""
    if not math.isfinite(value):
        return str(value)
    if name == SCALE:
        return _power(value)
    if name in (SKIPPED, IN_A_ROW):
        return f"{value:.0f}"
    return percent(value) if name in (UNDERFLOW, OVERFLOW) else f"{value:.3g}"


def _place(site: Site) -> str:
    """A site in a few characters: `train.py:12`."""
    return site.path or site.source.short


def line_of(latest: Mapping[str, float], shares: Shares | None, name_above: float) -> str:
    """All of it on one line; a site is named if it loses more than that share."""
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
    """Which steps are there."""
    if not len(history):
        return "nothing was given yet"
    return f"steps {history.steps[0]} to {history.last}, {history.updates} updates"


def table_of(history: History, latest: Mapping[str, float]) -> list[list[str]]:
    """A line of the table for each number."""
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
    """Where most was lost."""
    site = worst.site
    return f"Most {name}: {percent(worst.share)} of {site}, {site.pass_name}, in step {step}."


def text_of(head: str, table: list[list[str]], notes: list[str]) -> str:
    """All of it."""
    parts = [head]
    if table:
        parts.append(aligned([list(_HEADINGS), *table], [False, *[True] * (len(_HEADINGS) - 1)]))
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def html_of(head: str, table: list[list[str]], notes: list[str]) -> str:
    """The same for notebooks; what was not finite is red."""
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
        """Write it over the one before.

        Args:
            line: What is new.
            alarm: Whether something is wrong.
            draw: Whether it is time to write. If not, it need not be seen.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave the last one there."""


@runtime_checkable
class PostfixBar(Protocol):
    """A tqdm bar, or what can do the same."""

    def set_postfix_str(self, s: str, refresh: bool) -> object:
        """Show text behind the bar."""
        ...


class Bar(Display):
    """Behind the user's bar, which stays theirs."""

    def __init__(self, bar: object):
        if not isinstance(bar, PostfixBar):
            raise TypeError(
                "`bar` must be a tqdm bar, or anything with `set_postfix_str(text, refresh)`; got "
                f"{type(bar).__name__}"
            )
        self._bar = bar

    def show(self, line: str, *, alarm: bool, draw: bool) -> None:
        """It is drawn by the bar, too, and for the last time at the end of the loop."""
        # Without `refresh`, the bar shows the line when it next draws itself.
        self._bar.set_postfix_str(line, refresh=draw)

    def close(self) -> None:
        """It is closed by whoever made it."""


class Tqdm(Display):
    """A line of tqdm's, without a bar."""

    def __init__(self) -> None:
        with _installed("tqdm"):
            from tqdm.auto import tqdm

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
        with _installed("rich"):
            from rich.live import Live
            from rich.text import Text

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


def display(style: Style | None, bar: object) -> Display | None:
    """What the user asked for."""
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
