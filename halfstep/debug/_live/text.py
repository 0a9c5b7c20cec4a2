"""The live view as a line, as a table, and as HTML."""

import html as escaping
import math
from collections.abc import Mapping

import numpy as np

from halfstep._base import ABSENT, aligned, html_table, percent
from halfstep.debug._instrument.site import Site
from halfstep.debug._live.history import History, Part
from halfstep.debug._live.shares import Shares, Worst

LOSS, SCALE, SKIPPED, IN_A_ROW = "loss", "loss_scale", "skipped", "skipped_in_a_row"
UNDERFLOW, OVERFLOW = "underflow", "overflow"
KNOWN = (LOSS, SCALE, SKIPPED, IN_A_ROW, UNDERFLOW, OVERFLOW)
COLUMNS = ("", "now", "lowest", "highest", "not finite")


def power(value: float) -> str:
    """A loss scale: `2^15`."""
    if value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5:
        return f"2^{math.frexp(value)[1] - 1}"
    return f"{value:g}"


def shown(name: str, value: float) -> str:
    """A number by its name."""
    if not math.isfinite(value):
        return str(value)
    if name == SCALE:
        return power(value)
    if name in (SKIPPED, IN_A_ROW):
        return f"{value:.0f}"
    return percent(value) if name in (UNDERFLOW, OVERFLOW) else f"{value:.3g}"


def place(site: Site) -> str:
    """A site in a few characters: `train.py:12`."""
    return site.path or site.source.short


def line(latest: Mapping[str, float], shares: Shares | None, name_above: float) -> str:
    """All of it on one line; a site is named if it loses more than that share."""
    parts = []
    for name, title in ((LOSS, "loss"), (SCALE, "scale")):
        if name in latest:
            parts.append(f"{title} {shown(name, latest[name])}")
    if SKIPPED in latest:
        text = f"skipped {shown(SKIPPED, latest[SKIPPED])}"
        if IN_A_ROW in latest:
            text += f" ({shown(IN_A_ROW, latest[IN_A_ROW])} in a row)"
        parts.append(text)
    for name in (UNDERFLOW, OVERFLOW):
        if name in latest:
            text = f"{name} {shown(name, latest[name])}"
            worst = None if shares is None else getattr(shares, f"most_{name}")
            if worst is not None and worst.share > name_above:
                text += f" ({percent(worst.share)} at {place(worst.site)})"
            parts.append(text)
    parts += [f"{name} {shown(name, latest[name])}" for name in latest if name not in KNOWN]
    return " | ".join(parts)


def headline(history: History) -> str:
    """Which steps are there."""
    if not len(history):
        return "nothing was given yet"
    return f"steps {history.steps[0]} to {history.last}, {history.updates} updates"


def rows(history: History, latest: Mapping[str, float]) -> list[list[str]]:
    """A line of the table for each number."""
    known = [name for name in KNOWN if name in history.names]
    made = []
    for name in [*known, *(name for name in history.names if name not in KNOWN)]:
        low, high = history.part(name, Part.LOW).min(), history.part(name, Part.HIGH).max()
        is_any = bool(history.part(name, Part.COUNT).any())
        bad = int(np.sum(history.part(name, Part.BAD)))
        ends = [shown(name, float(end)) if is_any else ABSENT for end in (low, high)]
        cells = [name.replace("_", " "), shown(name, latest[name]), *ends]
        made.append([*cells, str(bad) if bad else ABSENT])
    return made


def worst_line(name: str, worst: Worst, step: int) -> str:
    """Where most was lost."""
    site = worst.site
    return f"Most {name}: {percent(worst.share)} of {site}, {site.pass_name}, in step {step}."


def text(head: str, table: list[list[str]], notes: list[str]) -> str:
    """All of it."""
    parts = [head]
    if table:
        parts.append(aligned([list(COLUMNS), *table], [False, *[True] * (len(COLUMNS) - 1)]))
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def html(head: str, table: list[list[str]], notes: list[str]) -> str:
    """The same for notebooks; what was not finite is red."""
    parts = [f"<p>{escaping.escape(head)}</p>"]
    if table:
        cells = [[(cell, at > 0) for at, cell in enumerate(row)] for row in table]
        heads = [(name, at > 0) for at, name in enumerate(COLUMNS)]
        parts.append(html_table(heads, cells, [row[-1] == ABSENT for row in table]))
    parts += [f"<p>{escaping.escape(note)}</p>" for note in notes]
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'
