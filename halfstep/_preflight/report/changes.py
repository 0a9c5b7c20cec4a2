"""Find what differs between two entries of one step."""

import dataclasses
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from halfstep._base import ABSENT, flops, percent, seconds, size
from halfstep._preflight.hlo.products import Product
from halfstep._preflight.report.preflight_entry import PreflightEntry
from halfstep._preflight.report.roles import Argument

Unit = Literal["bytes", "FLOP", "count", "seconds", "text"]
Value = int | float | str | None

RECOMPUTED = "rematted_computation"
"""The scope of the operations that `jax.checkpoint` recomputes in the backward pass."""

HALFSTEP = "version of halfstep"


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure that differs between two reports.

    Attributes:
        what: The figure, such as `peak`, `memory: temporaries` or `all-gather bfloat16`.
        before: Its value in the earlier report; `None` if the report does not have it.
        after: Its value in the later report; `None` if the report does not have it.
        unit: The unit of the values: `bytes`, `FLOP`, `count`, `seconds` or `text`.
        bytes: The bytes by which a change of `text`, such as an argument's dtype, changes the
            memory.
    """

    what: str
    before: Value
    after: Value
    unit: Unit
    bytes: int | None = None

    @property
    def difference(self) -> int | float | None:
        """After minus before; `None` if the values are not numbers."""
        if isinstance(self.before, int | float) and isinstance(self.after, int | float):
            return self.after - self.before
        return None

    @property
    def texts(self) -> tuple[str, str, str]:
        """Before, after and change, for a table."""
        return self._shown(self.before), self._shown(self.after), self._change()

    def _shown(self, value: Value) -> str:
        if value is None or isinstance(value, str):
            return ABSENT if value is None else value
        return _UNITS[self.unit](value)

    def _change(self) -> str:
        difference = self.difference
        if difference is None:
            return signed(size, self.bytes) if self.bytes else ""
        text = signed(_UNITS[self.unit], difference)
        before = self.before
        if not isinstance(before, int | float) or not before or not self.after:
            return text
        share = difference / before
        # Beyond tenfold, a percentage is harder to read than the two figures next to it.
        if share > 10:
            return text
        return f"{text} ({'+' if share > 0 else '-'}{percent(abs(share))})"

    @property
    def order(self) -> tuple[int, float, str]:
        """The sort key: the peak first, then memory by bytes, then counts by share, then words."""
        if self.what in ("fits", "peak"):
            return 0, float(self.what == "peak"), self.what
        difference = self.difference if self.unit == "bytes" else self.bytes
        if difference is not None:
            return 1, -float(abs(difference)), self.what
        if self.difference is None:
            return 3, 0.0, self.what
        # A count that rises from zero, or falls to zero, is a larger change than any share.
        low = min(abs(float(self.before or 0)), abs(float(self.after or 0)))
        return 2, -abs(self.difference) / low if low else -float("inf"), self.what


def signed(shown: Callable[[int | float], str], value: int | float) -> str:
    """Format a difference with its sign: `+1.50 GiB`, `-24`."""
    return f"{'+' if value > 0 else '-' if value < 0 else ''}{shown(abs(value))}"


_UNITS: Mapping[str, Callable[[int | float], str]] = types.MappingProxyType(
    {
        "bytes": size,
        "FLOP": flops,
        "count": lambda value: f"{value:,}" if isinstance(value, int) else f"{value:,.4g}",
        "seconds": seconds,
        "text": str,
    }
)


def changes(before: PreflightEntry, after: PreflightEntry) -> tuple[Change, ...]:
    """Find every figure that both entries have and that differs, the largest changes first."""
    found = [*_figures(before, after), *_counts(before, after), *_settings(before, after)]
    if before.arguments is not None and after.arguments is not None:
        found += _arguments(before.arguments, after.arguments)
    return tuple(sorted(found, key=lambda change: change.order))


FIGURES: tuple[tuple[str, str, Unit], ...] = (
    ("peak", "peak_bytes", "bytes"),
    ("arguments", "argument_bytes", "bytes"),
    ("outputs", "output_bytes", "bytes"),
    ("outputs in place of arguments", "alias_bytes", "bytes"),
    ("temporaries", "temp_bytes", "bytes"),
    ("in the host's memory", "host_bytes", "bytes"),
    ("traffic", "traffic_bytes", "bytes"),
    ("usable", "usable_bytes", "bytes"),
    ("memory of the device", "capacity_bytes", "bytes"),
    ("devices", "devices", "count"),
)
"""Figures that are one number, by their names in `report.detail()`."""


def _figures(before: PreflightEntry, after: PreflightEntry) -> Iterator[Change]:
    if before.fits != after.fits:
        yield Change("fits", _fits(before), _fits(after), "text")
    for what, field, unit in FIGURES:
        old, new = getattr(before, field), getattr(after, field)
        if old is None or new is None or old == new:
            continue
        change = Change(what, old, new, unit)
        at_peak = Change(what, before.memory.get(what), after.memory.get(what), unit)
        # Most often all allocated memory is in use at the peak, and one row is enough.
        if change.texts != at_peak.texts:
            yield change
    if before.peak_bytes is not None and after.peak_bytes is not None:
        yield from _each("memory: {}", before.memory, after.memory, "bytes")
    if before.peak is not None and after.peak is not None:
        yield from _each("at the peak: {}", _computed(before), _computed(after), "bytes")
    if before.written is not None and after.written is not None:
        yield from _each("written in {}", before.written, after.written, "bytes")
    if before.roofline is not None and after.roofline is not None:
        old, new = before.roofline.bound_seconds, after.roofline.bound_seconds
        if old != new:
            yield Change("time bound", old, new, "seconds")
    yield from _each("compiler's estimate: {}", before.estimates, after.estimates, "count")


def _each(
    what: str,
    before: Mapping[str, int] | Mapping[str, float],
    after: Mapping[str, int] | Mapping[str, float],
    unit: Unit,
) -> Iterator[Change]:
    """Yield the values of two mappings that differ. A name that is missing on one side is 0."""
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, 0), after.get(name, 0)
        if old != new:
            yield Change(what.format(name), old, new, unit)


def _computed(entry: PreflightEntry) -> dict[str, int]:
    """Return the bytes at the peak by role, except arguments: they are already rows of `memory`."""
    found = {} if entry.peak is None else entry.peak.by("role")
    return {role: size for role, size in found.items() if role not in entry.memory}


def _fits(entry: PreflightEntry) -> str:
    return "yes" if entry.fits else "NO"


def _counts(before: PreflightEntry, after: PreflightEntry) -> Iterator[Change]:
    def each(
        what: str, unit: Unit, of: Callable[[PreflightEntry], Mapping[str, int]]
    ) -> Iterator[Change]:
        return _each(what, of(before), of(after), unit)

    if before.contractions is not None and after.contractions is not None:
        yield from each("contractions {}", "count", _contractions)
        yield from each("FLOPs in {}", "FLOP", lambda entry: entry.contraction_flops() or {})
    if before.products is not None and after.products is not None:
        yield from _products(before.products, after.products)
        yield from each("contractions in fp8", "count", _in_f8)
        yield from each("contractions recomputed by jax.checkpoint", "count", _again)
    if before.collectives is not None and after.collectives is not None:
        yield from each("{}", "bytes", _sent)
        yield from each("{}, count", "count", _collectives)
    yield from each("kernel {}, count", "count", lambda entry: dict(entry.uncounted))


def _contractions(entry: PreflightEntry) -> dict[str, int]:
    return {f"{c.lhs} x {c.rhs} -> {c.out}": c.count for c in entry.contractions or ()}


def _in_f8(entry: PreflightEntry) -> dict[str, int]:
    return {"": 0 if entry.f8 is None else entry.f8.count}


def _again(entry: PreflightEntry) -> dict[str, int]:
    return {"": recomputed(entry.products or ())}


def _sent(entry: PreflightEntry) -> dict[str, int]:
    return {f"{one.kind} {one.dtype}": one.bytes for one in entry.collectives or ()}


def _collectives(entry: PreflightEntry) -> dict[str, int]:
    return {f"{one.kind} {one.dtype}": one.count for one in entry.collectives or ()}


def recomputed(products: tuple[Product, ...]) -> int:
    """Count the contractions of the backward pass that repeat one of the forward pass."""
    return sum(product.count for product in products if RECOMPUTED in product.name)


def _products(before: tuple[Product, ...], after: tuple[Product, ...]) -> Iterator[Change]:
    """Yield products of the same shapes whose dtypes differ.

    Names and lines are not keys: a new release of JAX can write other names, and an edit moves
    lines. They are shown as they are in the later report.
    """
    old, new = _by_shape(before), _by_shape(after)
    for shapes in old.keys() & new.keys():
        gone, come = old[shapes][0] - new[shapes][0], new[shapes][0] - old[shapes][0]
        if gone and come:
            places = [new[shapes][1][dtypes] for dtypes in come]
            what = f"product {shapes} at {', '.join(dict.fromkeys(places))}"
            yield Change(what, _dtypes(gone), _dtypes(come), "text")


def _by_shape(products: tuple[Product, ...]) -> dict[str, tuple[Counter[str], dict[str, str]]]:
    """Collect dtypes and their counts by shapes, and a place of each."""
    found: dict[str, tuple[Counter[str], dict[str, str]]] = {}
    for product in products:
        sides = [side.partition("[") for side in (product.lhs, product.rhs, product.out)]
        shapes = "{} x {} -> {}".format(*(f"[{rest}" for _, _, rest in sides))
        dtypes = "{} x {} -> {}".format(*(dtype for dtype, _, _ in sides))
        counts, places = found.setdefault(shapes, (Counter(), {}))
        counts[dtypes] += product.count
        places.setdefault(dtypes, product.source or product.name or "an unnamed line")
    return found


def _dtypes(counts: Counter[str]) -> str:
    return ", ".join(dtypes if n == 1 else f"{n} {dtypes}" for dtypes, n in sorted(counts.items()))


def _settings(before: PreflightEntry, after: PreflightEntry) -> Iterator[Change]:
    if before.variant != after.variant:
        yield Change("name of the step", before.variant, after.variant, "text")
    if before.gemm != after.gemm:
        yield Change("GPU matrix products by", before.gemm, after.gemm, "text")
    yield from _words("flag {}", _flags(before), _flags(after))
    if before.versions and after.versions:
        found = _words("version of {}", before.versions, after.versions)
        # The first reports did not say which halfstep wrote them; then versions of halfstep are not
        # compared.
        yield from (c for c in found if c.what != HALFSTEP or None not in (c.before, c.after))
    # Kernels that are not counted are compared separately.
    notes = [
        {note: note for note in entry.notes if not note.startswith("kernels whose FLOPs")}
        for entry in (before, after)
    ]
    yield from (
        dataclasses.replace(change, what="note") for change in _words("{}", notes[0], notes[1])
    )


def _flags(entry: PreflightEntry) -> dict[str, str]:
    pairs = [flag.partition("=") for flag in entry.flags]
    return {name: value or "given" for name, _, value in pairs}


def _words(what: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Change]:
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name), after.get(name)
        if old != new:
            yield Change(what.format(name), old, new, "text")


def _arguments(before: tuple[Argument, ...], after: tuple[Argument, ...]) -> Iterator[Change]:
    """Yield arguments that differ. Arrays that change in the same way are one row."""
    old, new = ({one.name: one for one in side} for side in (before, after))
    # If the dtype of an optimizer changes, all its leaves change in the same way and are one row.
    groups: dict[tuple[str, str | None, str | None], list[tuple[str, int]]] = {}
    for name in dict.fromkeys([*old, *new]):
        was, now = old.get(name), new.get(name)
        if was == now:
            continue
        both = [one for one in (was, now) if one is not None]
        role = " -> ".join(dict.fromkeys(one.role for one in both))
        same_shape = len(both) == 2 and both[0].shape == both[1].shape
        resharded = same_shape and both[0].dtype == both[1].dtype and both[0].bytes != both[1].bytes
        shown = [
            None if one is None else _shown(one, shape=not same_shape, bytes=resharded)
            for one in (was, now)
        ]
        grown = (now.bytes if now else 0) - (was.bytes if was else 0)
        groups.setdefault((role, shown[0], shown[1]), []).append((name, grown))
    for (role, was_, now_), members in groups.items():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        total = sum(grown for _, grown in members)
        yield Change(f"{role}: {members[0][0]}{more}", was_, now_, "text", total)


def _shown(argument: Argument, *, shape: bool, bytes: bool) -> str:
    dims = f"[{','.join(map(str, argument.shape))}]" if shape else ""
    # The same array is sharded differently: only its bytes on a device show it.
    part = f", {size(argument.bytes)} on a device" if bytes else ""
    return f"{argument.dtype}{dims}{part}{', donated' if argument.donated else ''}"
