"""Show entries as text in aligned columns, as HTML for notebooks, and as stacked bars."""

import html as escaping
import os
from collections.abc import Callable, Iterator, Sequence

from halfstep._autocast import ROUNDED
from halfstep._base import ABSENT, aligned, figure_of, flops, html_table, percent, seconds, size
from halfstep._preflight.hlo.products import Product, described, no_units
from halfstep._preflight.report.preflight_entry import (
    CODE,
    OUTPUTS,
    PADDING,
    TEMPORARIES,
    PreflightEntry,
)
from halfstep._preflight.report.roles import BATCH, OPTIMIZER, OTHER, PARAMETERS


def bound(entry: PreflightEntry) -> str:
    """Format the roofline's bound, marked as a bound."""
    if entry.roofline is None:
        return ABSENT
    return f">= {seconds(entry.roofline.bound_seconds)} ({entry.roofline.limit})"


def precision(entry: PreflightEntry) -> str:
    """List the dtypes in which the contractions run, by share of the FLOPs."""
    by_dtype = entry.contraction_flops()
    if by_dtype is None:
        return ABSENT
    total = sum(by_dtype.values())
    if not total:
        return "none"
    ordered = sorted(by_dtype.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {percent(count / total)}" for name, count in ordered)


COLUMNS: tuple[tuple[str, bool, Callable[[PreflightEntry], str]], ...] = (
    ("target", False, lambda entry: entry.target),
    ("step", False, lambda entry: entry.variant),
    ("fits", False, lambda entry: "yes" if entry.fits else "NO"),
    ("peak", True, lambda entry: size(entry.peak_bytes)),
    ("usable", True, lambda entry: size(entry.usable_bytes)),
    ("headroom", True, lambda entry: size(entry.headroom)),
    ("traffic", True, lambda entry: size(entry.traffic_bytes)),
    ("time bound", True, bound),
    ("contractions in", False, precision),
)
"""Heading, whether the column is a number, and how a cell is made."""


def table(entries: Sequence[PreflightEntry]) -> str:
    """Format one line per entry, then the collectives, then notes on how to read the figures."""
    tables = [
        # Targets and steps name the rows.
        aligned([head, *rows], numbers, keys=sum(name in ("target", "step") for name in head))
        for head, numbers, rows, _ in _tables(entries)
    ]
    return "\n".join(["\n\n".join(tables), "", *_footnotes(entries)])


def html(entries: Sequence[PreflightEntry]) -> str:
    """Format the same figures as the text; only entries that do not fit have a color."""
    parts = [
        html_table(_with(head, numbers), [_with(row, numbers) for row in rows], good)
        for head, numbers, rows, good in _tables(entries)
    ]
    lines = [escaping.escape(line) for line in _footnotes(entries)]
    parts.append(f"<p>{'<br>'.join(lines)}</p>")
    # If the table is wider than the window, the table scrolls and the page does not.
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def _with(cells: Sequence[str], numbers: Sequence[bool]) -> list[tuple[str, bool]]:
    return list(zip(cells, numbers, strict=True))


def _tables(
    entries: Sequence[PreflightEntry],
) -> Iterator[tuple[list[str], list[bool], list[list[str]], list[bool]]]:
    """Yield each table: headings, which columns are numbers, rows, and which rows are good."""
    # A single variant needs no name.
    several = len({entry.variant for entry in entries}) > 1
    shown = [column for column in COLUMNS if column[0] != "step" or several]
    yield (
        [heading for heading, _, _ in shown],
        [number for _, number, _ in shown],
        [[cell(entry) for _, _, cell in shown] for entry in entries],
        [entry.fits for entry in entries],
    )
    wire = [
        [entry.target, entry.variant, found.kind, found.dtype, size(found.bytes), str(found.count)]
        for entry in entries
        for found in entry.collectives or ()
    ]
    if wire:
        head = ["target", "step", "collective", "dtype", "bytes a step", "count"]
        yield head, [False, False, False, False, True, True], wire, [True] * len(wire)
    few = _few_bits(entries)
    if few:
        numbers = [heading == "FLOPs" for heading in F8_HEADINGS]
        yield list(F8_HEADINGS), numbers, few, [True] * len(few)


F8_HEADINGS = ("target", "step", "in fp8", "FLOPs", "where", "why not")


def _few_bits(entries: Sequence[PreflightEntry], *, most: int = 6) -> list[list[str]]:
    """Count contractions in 8 bits, and list the largest others; nothing if none are."""
    if not any(product.of_recipe for entry in entries for product in entry.products or ()):
        return []
    rows: list[list[str]] = []
    for entry in entries:
        found = entry.f8
        if found is None or entry.products is None:
            continue
        units = "" if found.units else no_units(entry.target)
        counts = f"{found.count} of {found.total} contractions"
        rows.append([entry.target, entry.variant, counts, percent(found.flops), "", units])
        # The products are ordered by FLOPs already, so the first ones matter most.
        others = [product for product in entry.products if not product.in_f8]
        total = sum(product.flops for product in entry.products) or 1
        for product in others[:most]:
            shapes = f"  not {product.count}: {product.lhs} x {product.rhs}"
            where = product.source or product.name
            share = percent(product.flops / total)
            rows.append([entry.target, entry.variant, shapes, share, where, product.why_not])
        if others[most:]:
            count = sum(product.count for product in others[most:])
            share = percent(sum(product.flops for product in others[most:]) / total)
            more = "report.detail() has all"
            rows.append([entry.target, entry.variant, f"  not {count} more", share, "", more])
    return rows


def _footnotes(entries: Sequence[PreflightEntry]) -> list[str]:
    """Say how to read the figures."""
    lines = ["Compiled, not run; figures are for one device."]
    if any(entry.roofline is not None for entry in entries):
        lines.append("The time bound is a roofline: no run can be faster, most are slower.")
    gemms = sorted({entry.gemm for entry in entries if entry.gemm})
    if gemms:
        lines.append(f"GPU matrix products: {' and '.join(gemms)}, autotuning off.")
    lines += [f"{entry.target}, {entry.variant}: {n}." for entry in entries for n in entry.notes]
    return lines


def detail(entry: PreflightEntry) -> str:
    """Format every figure of an entry, one per line."""
    pairs = [(heading, cell(entry)) for heading, _, cell in COLUMNS]
    pairs += [("devices", str(entry.devices))]
    pairs += [
        ("arguments", size(entry.argument_bytes)),
        ("outputs", size(entry.output_bytes)),
        ("outputs in place of arguments", size(entry.alias_bytes)),
        ("temporaries", size(entry.temp_bytes)),
    ]
    pairs += [(f"memory: {role}", size(count)) for role, count in entry.memory.items()]
    pairs += [
        (f"written in {dtype}", size(count)) for dtype, count in (entry.written or {}).items()
    ]
    pairs += [
        (f"contraction: {c.lhs} x {c.rhs} -> {c.out}", f"{flops(c.flops)} in {c.count}")
        for c in entry.contractions or ()
    ]
    if entry.f8 is not None and any(product.of_recipe for product in entry.products or ()):
        counts = f"{entry.f8.count} of {entry.f8.total} contractions"
        pairs += [("in fp8", f"{counts}, {percent(entry.f8.flops)} of the FLOPs")]
        pairs += [("not in fp8", described(p)) for p in entry.products or () if not p.in_f8]
    pairs += [
        (f"collective: {c.kind} {c.dtype}", f"{size(c.bytes)} in {c.count}")
        for c in entry.collectives or ()
    ]
    pairs += [(f"compiler's estimate: {k}", f"{v:.4g}") for k, v in entry.estimates.items()]
    pairs += [("flags", " ".join(entry.flags) or "none")]
    pairs += [("versions", ", ".join(f"{k} {v}" for k, v in entry.versions.items()))]
    pairs += [("note", note) for note in entry.notes]
    return aligned([list(pair) for pair in pairs], [False, False])


def f8_miss(entry: PreflightEntry, share: float | int) -> str:
    """List the products that have to be in 8 bits and are not; empty if enough are."""
    name = f"{entry.variant} on {entry.target}"
    required = f"required: {percent(share)} of the eligible contractions' FLOPs in fp8"
    found = entry.f8
    if found is None or entry.products is None:
        return f"{required}; there is no program of {name}: {'; '.join(entry.notes)}."
    if not found.units and share > 0:
        return f"{required}; {no_units(entry.target)}."
    if found.eligible >= share:
        return ""
    lines = [f"{required}; {name} has {percent(found.eligible)}:"]
    missed = [product for product in entry.products if product.of_recipe and not product.in_f8]
    if not missed:
        return f'{lines[0][:-1]}, and no product of a recipe\'s: give it policy="f8", say.'
    lines += [f"  {described(product)}" for product in missed]
    lines.append(f"    Fix: {_fix(entry, missed)}")
    return "\n".join(lines)


def _fix(entry: PreflightEntry, missed: Sequence[Product]) -> str:
    # These products are rounded, and multiplied in 16 bits, on purpose: no choice of the compiler
    # changes that.
    if all(ROUNDED in product.name for product in missed):
        return (
            "scales of whole tensors (recipe 'f8'), or of rows in matrix products ('f8-row'), are "
            "multiplied in 8 bits, and on one Hopper or Blackwell GPU also those of blocks of 128 "
            "('f8-block'); leave such products out with a rule, or ask for less."
        )
    other = "gemm='library'" if entry.gemm == "triton" else "gemm='triton'"
    way = f"try {other}, which makes products in another way; or " if entry.gemm else ""
    return f"{way}keep them in 16 bits with a rule such as 'op:dot_general@scope=compute'."


# The picture.

# Few hues, which color-blind readers can also tell apart: the arguments are blue.
_COLORS = (
    (PARAMETERS, "#0067a5"),
    (OPTIMIZER, "#5da5d6"),
    (BATCH, "#b3d4ea"),
    (OTHER, "#8c959f"),
    (PADDING, "#d0d7de"),
    (OUTPUTS, "#00775a"),
    (CODE, "#57606a"),
    (TEMPORARIES, "#c77f2e"),
)


def plot(entries: Sequence[PreflightEntry], path: str | os.PathLike[str]) -> None:
    """Draw the memory of entries into a file."""
    figure = figure_of("a report")
    largest = max(sum(entry.memory.values()) for entry in entries)
    unit, scale = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    figure.set_size_inches(5.4, 1.9 + 0.45 * len(entries))
    axes = figure.add_subplot()
    rows = range(len(entries))
    starts = [0.0] * len(entries)
    for role, color in _COLORS:
        widths = [entry.memory.get(role, 0) / scale for entry in entries]
        if any(widths):
            axes.barh(rows, widths, left=starts, color=color, label=role, height=0.68)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
    limits = [entry.usable_bytes / scale for entry in entries]
    # A limit far off the scale would press all bars together, so it is left out; the label says
    # whether the step fits.
    right = (max(starts) or 1.0) * 1.4
    near = [limit <= right * 1.6 for limit in limits]
    if any(near):
        right = max(right, *(limit * 1.12 for limit, at in zip(limits, near, strict=True) if at))
    for row, (entry, end, limit, at) in enumerate(zip(entries, starts, limits, near, strict=True)):
        text = f" {size(entry.peak_bytes)}" + ("" if entry.fits else ",\n does not fit")
        if entry.temp_bytes is None:
            # Only the arguments are known, so only they are drawn.
            text = " does not fit:\n the compiler gave up"
        # A limit near the end of the bar would cross the text: the text stands on white above it.
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0}
        color = "black" if entry.fits else "#b00020"
        axes.text(end, row, text, va="center", fontsize=10, color=color, bbox=box, zorder=4)
        if at:
            label = "usable memory" if row == near.index(True) else None
            axes.plot([limit, limit], [row - 0.42, row + 0.42], color="black", lw=2, label=label)
    axes.set_yticks(rows, [_name(entry, entries) for entry in entries])
    axes.invert_yaxis()
    axes.set_xlim(0, right)
    axes.set_xlabel(f"peak of one device, {unit} (compiled, not run)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    figure.savefig(path, dpi=150)


def _name(entry: PreflightEntry, entries: Sequence[PreflightEntry]) -> str:
    several = len({other.variant for other in entries}) > 1
    return f"{entry.target}\n{entry.variant}" if several else entry.target
