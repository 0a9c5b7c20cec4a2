"""A report as text, in aligned columns."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from halfstep._explain._entry import ExplainEntry
from halfstep._explain._f8 import fix, is_eligible, why_not
from halfstep._explain._sources import Source
from halfstep._explain._totals import is_low
from halfstep._tables import ABSENT, aligned, flops, percent, size

if TYPE_CHECKING:
    from halfstep._explain._report import ExplainReport

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
_LINES = 4
_WIDEST = MappingProxyType({"  operation": 24, "dtypes": 20, "why": 40})


def summary(report: "ExplainReport") -> str:
    """The totals, one a line."""
    return aligned([list(pair) for pair in figures(report)], [False, False])


def figures(report: "ExplainReport") -> list[tuple[str, str]]:
    """The totals with what they are called."""
    totals = report.totals
    total = sum(totals.contraction_flops.values())
    shares = [
        f"{name} {percent(count / total)}" for name, count in totals.contraction_flops.items()
    ]
    pairs = [
        (report.name, f"policy {report.policy}, {_number(len(report.operations), 'operation')}"),
        ("contractions", f"{flops(total)}: {', '.join(shares)}" if total else "none"),
        *_few_bits(report),
        (
            "float32 islands",
            f"{totals.islands}, {flops(totals.again_flops)} computed again for the gradient",
        ),
        ("casts", f"{totals.casts} added"),
    ]
    if totals.stored is not None:
        pairs.append(("stored for backward", stored(totals.stored)))
        pairs.append(("  casts of arguments", stored(totals.stored_casts or {})))
        pairs.append(("  as it is written", stored(totals.stored_float32 or {})))
    pairs += [("note", note) for note in report.notes]
    pairs.append(("findings", str(len(report.findings)) if report.findings else "none"))
    return pairs


def _few_bits(report: "ExplainReport") -> list[tuple[str, str]]:
    """How many contractions are in few bits, and why not the others."""
    f8 = report.totals.f8
    if f8 is None:
        return []
    count = f"{f8.count} of {_number(f8.total, 'contraction')} ({percent(f8.flops)} of the FLOPs)"
    pairs = [(f"  in {f8.format}", f"{count}; {percent(f8.eligible)} of what {f8.recipe} is for")]
    for other in f8.others:
        mark = "missed" if other.eligible else "not for it"
        named = [*other.sources[:_LINES], *(["..."] if len(other.sources) > _LINES else [])]
        pairs.append((f"  {mark}", f"{other.count}: {other.reason}: {', '.join(named)}"))
    return pairs


def stored(found: Mapping[str, int]) -> str:
    """Bytes by dtype, and together."""
    if not found:
        return "nothing"
    parts = [f"{name} {size(count)}" for name, count in found.items()]
    return parts[0] if len(parts) == 1 else f"{size(sum(found.values()))}: {', '.join(parts)}"


def table(entries: Sequence[ExplainEntry], *, full: bool) -> str:
    """The operations, all of them or by line."""
    made = rows(entries, full=full)
    shown = [
        [
            _short(cell, _WIDEST.get(heading) if not full else None)
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
        f"{text}\n{_number(moved, 'operation')} without arithmetic in floating point left out; "
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


def misses(
    report: "ExplainReport", *, low: float | int, max_findings: int, f8: float | int | None = None
) -> str:
    """What is not as it is required; empty if all is."""
    lines: list[str] = []
    if report.totals.low < low:
        lines.append(
            f"required: {percent(low)} of the contractions' FLOPs in {report.compute}; "
            f"{report.name} has {percent(report.totals.low)}:"
        )
        others = [
            entry
            for entry in report.operations
            if entry.is_contraction and not is_low(entry, report.compute)
        ]
        lines += [
            f"  {source}: {' '.join(row[:2])}: {row[3]}" for source, row in rows(others, full=False)
        ]
    if f8 is not None:
        lines += _f8_misses(report, f8)
    if len(report.findings) > max_findings:
        most = "no findings" if not max_findings else f"at most {_number(max_findings, 'finding')}"
        lines.append(f"required: {most}; {report.name} has {len(report.findings)}:")
        lines += [str(finding) for finding in report.findings]
    return "\n".join(lines)


def _f8_misses(report: "ExplainReport", share: float | int) -> list[str]:
    """What is not in few bits, though the recipe is for it."""
    found, recipe = report.totals.f8, report.recipe
    if found is None or recipe is None:
        return [
            f"required: {percent(share)} of the eligible contractions' FLOPs in fp8; the policy "
            f'{report.policy} has no recipe: write policy="f8", say.'
        ]
    if found.eligible >= share:
        return []
    lines = [
        f"required: {percent(share)} of the eligible contractions' FLOPs in {found.format}; "
        f"{report.name} has {percent(found.eligible)}:"
    ]
    missed = [
        entry
        for entry in report.operations
        if entry.is_contraction and not entry.in_f8 and is_eligible(entry)
    ]
    for entry in dict.fromkeys(missed):
        name = f" by {entry.parameter}" if entry.parameter else ""
        scope = f" in {entry.scope}" if entry.scope else ""
        shapes = " x ".join(map(str, entry.ins[:2]))
        lines.append(f"  {entry.source}: {entry.name} {shapes}{name}{scope}: {why_not(entry)}")
        lines.append(f"    Fix: {fix(entry, recipe)}")
    return lines


def _number(count: int, name: str) -> str:
    return f"{count:,} {name}" if count == 1 else f"{count:,} {name}s"


def _short(text: str, width: int | None) -> str:
    return text if width is None or len(text) <= width else f"{text[: width - 2]}.."
