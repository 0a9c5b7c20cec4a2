"""Entries as a table for notebooks."""

import html as escaping
from collections.abc import Sequence

from halfstep._base import html_table, size
from halfstep._preflight._entry import PreflightEntry
from halfstep._preflight._text import F8_HEADINGS, columns, few_bits, footnotes


def html(entries: Sequence[PreflightEntry]) -> str:
    """The same figures as the text, with colors of its own for nothing but what does not fit."""
    shown = columns(entries)
    head = [(heading, number) for heading, number, _ in shown]
    rows = [[(cell(entry), number) for _, number, cell in shown] for entry in entries]
    parts = [html_table(head, rows, [entry.fits for entry in entries])]
    wire = [
        [
            (entry.target, False),
            (entry.variant, False),
            (found.kind, False),
            (found.dtype, False),
            (size(found.bytes), True),
            (str(found.count), True),
        ]
        for entry in entries
        for found in entry.collectives or ()
    ]
    if wire:
        names = ("target", "step", "collective", "dtype", "bytes a step", "count")
        heads = [(name, number) for name, (_, number) in zip(names, wire[0], strict=True)]
        parts.append(html_table(heads, wire, [True] * len(wire)))
    few = few_bits(entries)
    if few:
        heads = [(name, name == "FLOPs") for name in F8_HEADINGS]
        cells = [[(cell, head[1]) for cell, head in zip(row, heads, strict=True)] for row in few]
        parts.append(html_table(heads, cells, [True] * len(few)))
    lines = footnotes(entries)
    lines += [f"{entry.target}, {entry.variant}: {n}." for entry in entries for n in entry.notes]
    parts.append("<p>" + "<br>".join(escaping.escape(line) for line in lines) + "</p>")
    # Wider than a narrow window: it scrolls, and the page does not.
    return '<div style="overflow-x:auto">' + "".join(parts) + "</div>"
