"""Write numbers and tables for people, as text and as HTML.

This is apart from `halfstep._base`, which imports JAX: commands that only print need none of it.
"""

import html as escaping
import itertools
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence

ABSENT = "-"
# A column of text that is narrower than this is not readable.
_NARROWEST = 12
_CELL = "padding:2px 10px;white-space:nowrap;text-align:"


def size(count: int | float | None) -> str:
    """Format bytes for people: `1.66 GiB`, `-4.1 MiB`."""
    if count is None:
        return ABSENT
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.2f} {unit}" if unit != "KiB" else f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def flops(count: int | float) -> str:
    """Format FLOPs for people: `1.28 TFLOP`."""
    for unit, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} FLOP"


def seconds(value: int | float) -> str:
    """Format a time for people: `1.2 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def percent(share: float | int) -> str:
    """Format a share for people: `99.2 %`."""
    # 100 % and 0 % are shown only when they are exact.
    if 0 < share < 0.001:
        return "<0.1 %"
    if 0.999 < share < 1:
        return ">99.9 %"
    return f"{share:.1%}".replace("%", " %").replace(".0 ", " ")


def number_of(count: int, name: str) -> str:
    """Format a count with its noun: `1 operation`, `1,200 operations`."""
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"


def aligned(
    rows: Sequence[Sequence[str]], numbers: Sequence[bool], *, keys: int = 1, split: bool = True
) -> str:
    """Align the cells of rows in columns, with numbers to the right.

    In a file or a pipe nothing is shortened. In a terminal that is too narrow, tables of text alone
    are wrapped. In other tables, the widest columns of text are shortened, and if that is not
    enough, columns go below the others.

    Args:
        rows: The cells, all rows of the same length. The first row may be the headings.
        numbers: Whether each column is a number. Numbers are never shortened.
        keys: How many columns, from the left, say what a row is about. They are never shortened,
            and are repeated if columns go below.
        split: Whether columns may go below.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(numbers))]
    room = _room()
    if room is None or _total(widths) <= room:
        return "\n".join(_line(row, widths, numbers) for row in rows)
    if not any(numbers):
        fitted = _fitted(widths, numbers, room, keys)
        return "\n".join(line for row in rows for line in _wrapped_row(row, fitted, numbers))
    if split and _total(_fitted(widths, numbers, room, keys)) > room:
        parts = _parts(widths, room, keys)
    else:
        parts = [[*range(len(widths))]]
    tables = []
    for part in parts:
        kinds = [numbers[at] for at in part]
        fitted = _fitted([widths[at] for at in part], kinds, room, keys)
        tables.append("\n".join(_line([row[at] for at in part], fitted, kinds) for row in rows))
    return "\n\n".join(tables)


def _room() -> int | None:
    """Return the columns of the terminal; `None` if the output goes elsewhere."""
    # Programs without a console, such as services on Windows, have no standard output at all.
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + 2 * (len(widths) - 1)


def _line(row: Sequence[str], widths: Sequence[int], numbers: Sequence[bool]) -> str:
    cells = [
        shortened(cell, width).rjust(width) if number else shortened(cell, width).ljust(width)
        for cell, width, number in zip(row, widths, numbers, strict=True)
    ]
    return "  ".join(cells).rstrip()


def _wrapped_row(
    row: Sequence[str], widths: Sequence[int], numbers: Sequence[bool]
) -> Iterator[str]:
    cells = [
        textwrap.wrap(cell, width, break_on_hyphens=False)
        for cell, width in zip(row, widths, strict=True)
    ]
    for parts in itertools.zip_longest(*cells, fillvalue=""):
        yield _line(parts, widths, numbers)


def wrapped(text: str) -> str:
    """Wrap the lines that are longer than the terminal, and keep their indentation."""
    room = _room()
    if room is None:
        return text
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= room:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()))
        lines += textwrap.wrap(
            line,
            room,
            subsequent_indent=indent,
            break_on_hyphens=False,
            # A path or a command that is broken cannot be copied.
            break_long_words=False,
        )
    return "\n".join(lines)


def shortened(text: str, width: int) -> str:
    """Cut a text to at most `width` characters; two dots stand for the part that was cut."""
    return text if len(text) <= width else f"{text[: width - 2]}.."


def _fitted(widths: Sequence[int], numbers: Sequence[bool], room: int, keys: int) -> list[int]:
    """Return column widths that fit next to each other; the widest columns of text shrink."""
    fitted = list(widths)
    texts = [at for at, number in enumerate(numbers) if not number and at >= keys]
    while _total(fitted) > room:
        # Numbers are never cut: a wrong digit count is worse than a line that wraps.
        widest = max(texts, key=lambda at: fitted[at], default=None)
        if widest is None or fitted[widest] <= _NARROWEST:
            break
        fitted[widest] -= 1
    return fitted


def _parts(widths: Sequence[int], room: int, keys: int) -> list[list[int]]:
    """Divide columns into tables that fit, each with the columns that name a row."""
    first = [*range(keys)]
    others = range(keys, len(widths))
    # Where nothing but these columns fits, they would be repeated for each of the others.
    if any(_total([*widths[:keys], min(widths[at], _NARROWEST)]) > room for at in others):
        return [[*first, *others]]
    parts = [first]
    for at in others:
        if parts[-1] != first and _total([widths[one] for one in (*parts[-1], at)]) > room:
            parts.append(first)
        parts[-1] = [*parts[-1], at]
    return parts


def html_table(
    head: Sequence[tuple[str, bool]],
    rows: Sequence[Sequence[tuple[str, bool]]],
    good: Sequence[bool],
) -> str:
    """Make a table for notebooks. Cells say if they are numbers; rows that are not good are red."""
    lines = [
        '<table style="margin:0 0 0.8em"><thead><tr>',
        *(_cell("th", *cell) for cell in head),
        "</tr></thead><tbody>",
    ]
    for row, fits in zip(rows, good, strict=True):
        lines.append("<tr>" if fits else '<tr style="color:#d32f2f;font-weight:bold">')
        lines += [_cell("td", *cell) for cell in row]
        lines.append("</tr>")
    return "".join([*lines, "</tbody></table>"])


def _cell(tag: str, text: str, number: bool) -> str:
    side = "right" if number else "left"
    return f'<{tag} style="{_CELL}{side}">{escaping.escape(text)}</{tag}>'
