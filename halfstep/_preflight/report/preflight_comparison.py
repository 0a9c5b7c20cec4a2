"""Compare two reports of one step."""

import dataclasses
import html as escaping
from collections.abc import Callable, Sequence
from typing import Any

from halfstep._base import Report, aligned, checked, html_table, percent, size
from halfstep._explain import LintError
from halfstep._preflight.report.causes import causes
from halfstep._preflight.report.changes import FIGURES, Change, changes
from halfstep._preflight.report.preflight_entry import PreflightEntry

_MOST = 40
"""The most rows of one entry that are printed; JSON has all of them."""

_HEADINGS = ("what", "before", "after", "change")


@dataclasses.dataclass(frozen=True, repr=False)
class EntryComparison:
    """The changes in one step on one target.

    Attributes:
        before: The entry of the earlier report.
        after: The entry of the later report.
        changes: Every figure that differs: the peak, then memory by bytes, then counts, then words.
        causes: Sentences about the causes that the figures show.
        not_compared: Figures that one of the reports does not have, with the report that lacks
            them.
    """

    before: PreflightEntry
    after: PreflightEntry
    changes: tuple[Change, ...]
    causes: tuple[str, ...]
    not_compared: tuple[str, ...]

    @property
    def peak_growth(self) -> float | None:
        """The growth of the peak as a share of the peak before; `None` if a peak is not known."""
        old, new = self.before.peak_bytes, self.after.peak_bytes
        if old is None or new is None:
            return None
        # A peak of zero cannot grow by a share; any growth counts as 100 %.
        return (new - old) / old if old else float(new > 0)

    def to_dict(self) -> dict[str, Any]:
        """Return all changes as plain values."""
        return {
            "target": self.after.target,
            "variant": self.after.variant,
            "changes": [
                {**dataclasses.asdict(change), "difference": change.difference}
                for change in self.changes
            ],
            "causes": list(self.causes),
            "not_compared": list(self.not_compared),
        }


@dataclasses.dataclass(frozen=True, repr=False)
class PreflightComparison(Report):
    """The changes between two reports; `report.compare(before)` makes a comparison.

    `print(comparison)` shows a table, and a notebook shows the same as HTML.

    Attributes:
        entries: The entries that both reports have. They are matched by target and step; if each
            report has only one step, the steps' names may differ.
        only_before: Target and step of entries that only the earlier report has.
        only_after: Target and step of entries that only the later report has.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def double(x):
            return 2 * x


        x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
        donated = halfstep.preflight(double, (x,), targets="h100", donate_argnums=0)
        kept = halfstep.preflight(double, (x,), targets="h100")

        comparison = kept.compare(donated)
        print(comparison)
        assert comparison.changed
        assert "A donation was lost: x" in str(comparison)
        assert not kept.compare(kept).changed
        ```
    """

    entries: tuple[EntryComparison, ...]
    only_before: tuple[tuple[str, str], ...]
    only_after: tuple[tuple[str, str], ...]

    @property
    def changed(self) -> bool:
        """Whether anything differs, including entries that only one report has."""
        alone = self.only_before or self.only_after
        return bool(alone) or any(entry.changes for entry in self.entries)

    def __str__(self) -> str:
        parts: list[str] = []
        rows = self._rows()
        if rows:
            numbers = [heading != "what" for heading in _HEADINGS]
            numbers = [False] * (len(rows[0]) - len(numbers)) + numbers
            parts.append(aligned(rows, numbers, keys=numbers.index(True)))
        lines = self._lines()
        return "\n\n".join([*parts, "\n".join(lines)] if lines else parts)

    def _repr_html_(self) -> str:
        rows, parts = self._rows(), list[str]()
        if rows:
            numbers = [heading in _HEADINGS[1:] for heading in rows[0]]
            cells = [list(zip(row, numbers, strict=True)) for row in rows]
            parts.append(html_table(cells[0], cells[1:], self._good()))
        lines = [escaping.escape(line) for line in self._lines()]
        parts.append(f"<p>{'<br>'.join(lines)}</p>")
        # If the table is wider than the window, the table scrolls and the page does not.
        return '<div style="overflow-x:auto">' + "".join(parts) + "</div>"

    def to_dict(self) -> dict[str, Any]:
        """Return all changes as plain values."""
        return {
            "changed": self.changed,
            "entries": [entry.to_dict() for entry in self.entries],
            "only_before": [list(key) for key in self.only_before],
            "only_after": [list(key) for key in self.only_after],
        }

    @checked
    def check(self, *, peak: float | int) -> None:
        """Raise if an entry got worse; for tests and CI.

        An entry is worse if its peak grew by more than a share, if it no longer fits, or if the
        later report does not have it.

        Args:
            peak: The growth of the peak that is allowed, as a share: 0.05 for 5 %.

        Raises:
            LintError: If an entry is worse. The message has every such entry.
        """
        lines = [
            f"{_named(target, step)} is not in the later report. Compile it again, or save a new "
            "report to compare with."
            for target, step in self.only_before
        ]
        lines += [worse for entry in self.entries if (worse := _worse(entry, peak))]
        if lines:
            raise LintError("\n".join(lines))

    def _rows(self) -> list[list[str]]:
        """Return the table with its headings; empty if nothing differs."""
        changed = [entry for entry in self.entries if entry.changes]
        several = [len({entry.after.target for entry in self.entries}) > 1]
        several += [len({entry.after.variant for entry in self.entries}) > 1]
        rows: list[list[str]] = []
        for entry in changed:
            names = (entry.after.target, entry.after.variant)
            begin = [name for name, shown in zip(names, several, strict=True) if shown]
            shown = entry.changes[:_MOST]
            rows += [[*begin, change.what, *change.texts] for change in shown]
        heads = [name for name, shown in zip(("target", "step"), several, strict=True) if shown]
        return [[*heads, *_HEADINGS], *rows] if rows else []

    def _good(self) -> list[bool]:
        """Return for each row whether it may be black: no peak that grew, no fit that was lost."""
        return [
            not (
                (change.what == "peak" and (change.difference or 0) > 0)
                or (change.what == "fits" and change.after == "NO")
            )
            for entry in self.entries
            for change in entry.changes[:_MOST]
        ]

    def _lines(self) -> list[str]:
        """Return the lines below the table."""
        one = len(self.entries) == 1
        lines: list[str] = []
        for entry in self.entries:
            begin = "" if one else f"{_named(entry.after.target, entry.after.variant)}: "
            lines += [begin + cause for cause in entry.causes]
            if not entry.changes:
                named = _named(entry.after.target, entry.after.variant)
                lines.append(f"{named}: nothing changed{_remark(entry)}.")
            if len(entry.changes) > _MOST:
                more = len(entry.changes) - _MOST
                lines.append(f"{begin}{more} smaller changes are not shown; to_json() has all.")
            if entry.not_compared:
                lines.append(f"{begin}Not compared: {', '.join(entry.not_compared)}.")
        lines += [f"{_named(*key)}: only in the earlier report." for key in self.only_before]
        lines += [f"{_named(*key)}: only in the later report." for key in self.only_after]
        return lines


def compared(
    before: Sequence[PreflightEntry], after: Sequence[PreflightEntry]
) -> PreflightComparison:
    """Match the entries of two reports, and find what changed in each pair."""
    # One step under two names is still one step: `step` and `train_step`, or another batch.
    single = all(len({entry.variant for entry in side}) == 1 for side in (before, after))

    def key(entry: PreflightEntry) -> tuple[str, str]:
        return entry.target, "" if single else entry.variant

    old, new = ({key(entry): entry for entry in side} for side in (before, after))
    return PreflightComparison(
        tuple(_pair(old[name], new[name]) for name in new if name in old),
        tuple((old[name].target, old[name].variant) for name in old if name not in new),
        tuple((new[name].target, new[name].variant) for name in new if name not in old),
    )


def _pair(before: PreflightEntry, after: PreflightEntry) -> EntryComparison:
    found = changes(before, after)
    return EntryComparison(
        before, after, found, causes(before, after, found), _not_compared(before, after)
    )


_MAY_LACK: tuple[tuple[str, Callable[[PreflightEntry], Any]], ...] = (
    *((what, lambda entry, field=field: getattr(entry, field)) for what, field, _ in FIGURES),
    ("contractions", lambda entry: entry.contractions),
    ("fp8 counts", lambda entry: entry.products),
    ("collectives", lambda entry: entry.collectives),
    ("bytes written by dtype", lambda entry: entry.written),
    ("arguments one by one", lambda entry: entry.arguments),
    ("the program's fingerprint", lambda entry: entry.program),
    ("versions", lambda entry: entry.versions or None),
    ("halfstep's version", lambda entry: entry.versions.get("halfstep")),
)


def _not_compared(before: PreflightEntry, after: PreflightEntry) -> tuple[str, ...]:
    found: list[str] = []
    for what, value in _MAY_LACK:
        lacking = [value(entry) is None for entry in (before, after)]
        if any(lacking):
            side = "earlier" if lacking[0] else "later"
            who = "neither report has it" if all(lacking) else f"not in the {side} report"
            found.append(f"{what} ({who})")
    return tuple(found)


def _remark(entry: EntryComparison) -> str:
    if entry.not_compared:
        return " in what both reports have"
    if entry.before.program != entry.after.program:
        return ", although the compiler was given another program"
    return ""


def _worse(entry: EntryComparison, allowed: float | int) -> str:
    before, after = entry.before, entry.after
    named = _named(after.target, after.variant)
    growth = entry.peak_growth
    if before.fits and not after.fits:
        return f"{named} does not fit any more: {size(after.usable_bytes)} are usable."
    # A compiler that gave up gives no peak. This must not pass for a peak that did not grow.
    if growth is None and before.peak_bytes is not None:
        return f"{named} has no peak in the later report: {'; '.join(after.notes)}."
    if growth is None or growth <= allowed:
        return ""
    return (
        f"{named}: the peak grew by more than {percent(allowed)}: {size(before.peak_bytes)} -> "
        f"{size(after.peak_bytes)} (+{percent(growth)}). Look at what changed, or allow more."
    )


def _named(target: str, step: str) -> str:
    return f"{target}, {step}"
