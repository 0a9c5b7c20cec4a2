"""The operations of a report as a table, in aligned columns."""

from collections.abc import Sequence
from types import MappingProxyType

from halfstep._base import ABSENT, aligned, flops, number_of, shortened, size
from halfstep._explain.entry import ExplainEntry
from halfstep._program import Source

HEADINGS = (
    ("  operation", False),
    ("dtypes", False),
    ("rule", False),
    ("why", False),
    ("runs", True),
    ("FLOPs", True),
    ("out", True),
)
"""Of the columns, and whether they hold numbers."""
ISLAND = "* in a float32 island, which is computed again for the gradient and not stored."
_WIDEST = MappingProxyType({"  operation": 24, "dtypes": 20, "why": 40})


def table(entries: Sequence[ExplainEntry], *, full: bool) -> str:
    """The operations, all of them or by line."""
    made = rows(entries, full=full)
    shown = [
        [
            shortened(cell, len(cell) if full else _WIDEST.get(heading, len(cell)))
            for cell, (heading, _) in zip(("  " + row[0], *row[1:]), HEADINGS, strict=True)
        ]
        for _, row in made
    ]
    head = [heading for heading, _ in HEADINGS]
    text, *lines = aligned([head, *shown], [number for _, number in HEADINGS]).split("\n")
    # One heading a source line, above its operations.
    above = ""
    for (source, _), line in zip(made, lines, strict=True):
        text += f"\n{line}" if source == above else f"\n{source}\n{line}"
        above = source
    if any(entry.island is not None for entry in entries):
        text += f"\n{ISLAND}"
    moved = left_out(entries)
    if full or not moved:
        return text
    return (
        f"{text}\n{number_of(moved, 'operation')} without arithmetic in floating point left out; "
        "table(full=True) shows all."
    )


def left_out(entries: Sequence[ExplainEntry]) -> int:
    """How many operations the short table does not have."""
    return sum(not _computes(entry) for entry in entries)


def rows(entries: Sequence[ExplainEntry], *, full: bool) -> list[tuple[str, list[str]]]:
    """The cells of the table, each row with the source line that it is of."""
    by_source: dict[Source, dict[object, list[ExplainEntry]]] = {}
    for number, entry in enumerate(entries):
        if full or _computes(entry):
            same = (entry.name, entry.dtypes, entry.rule, entry.by)
            groups = by_source.setdefault(entry.source, {})
            groups.setdefault(number if full else same, []).append(entry)
    return [
        (str(source), _row(group, full=full))
        for source, groups in by_source.items()
        for group in groups.values()
    ]


def _row(group: Sequence[ExplainEntry], *, full: bool) -> list[str]:
    first = group[0]
    count = sum(entry.count for entry in group)
    total = sum(entry.count * entry.flops for entry in group)
    out = sum(entry.count * entry.bytes_out for entry in group)
    types = first.dtypes
    if full:
        types = f"{', '.join(map(str, first.ins))} -> {', '.join(map(str, first.outs))}"
    island = "" if first.island is None else "*"
    return [
        first.name,
        types,
        f"{first.rule}{island}",
        first.reason,
        str(count),
        flops(total).replace("FLOP", "").strip() if total else ABSENT,
        size(out),
    ]


def _computes(entry: ExplainEntry) -> bool:
    """Whether an operation is arithmetic on floating-point numbers."""
    floats = {"f32", "f64", "bf16", "f16"}
    return (entry.flops > 0 or entry.rule == "as traced") and any(
        value.dtype in floats for value in entry.outs
    )
