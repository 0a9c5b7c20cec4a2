"""Search for the largest batch that fits, by doubling and then by interpolating or halving."""

import dataclasses
import html as escaping
from collections.abc import Callable
from typing import Any

from halfstep._base import Report, aligned, html_table, size
from halfstep._preflight.preflight_errors import DoesNotFitError, PreflightError
from halfstep._preflight.report.preflight_entry import PreflightEntry

_HEAD = (("batch", True), ("peak", True), ("verdict", False))


@dataclasses.dataclass(frozen=True, repr=False)
class LargestBatch(Report):
    """The largest batch that fits, and all batches that were tried to find it.

    Attributes:
        batch: The largest batch that fits.
        entry: The compiler's answer about that batch.
        tried: All batches that were compiled.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def step_for_batch(batch):
            x = jax.ShapeDtypeStruct((batch, 4096), jnp.float32)
            return (lambda x: jnp.tanh(x @ x.T)), (x,)


        found = halfstep.preflight.largest_batch(
            step_for_batch, target="l4", multiple_of=32768, maximum=32768
        )
        assert found.entry == found.tried[found.batch]
        assert found.batch == 32768
        ```
    """

    batch: int
    entry: PreflightEntry
    tried: dict[int, PreflightEntry]

    def named(self, variant: str) -> PreflightEntry:
        """Return the entry under another name, for a report with other entries."""
        return dataclasses.replace(self.entry, variant=variant)

    def __str__(self) -> str:
        rows = [[name for name, _ in _HEAD], *self._rows]
        return f"{self._headline}\n{aligned(rows, [is_number for _, is_number in _HEAD])}"

    def _repr_html_(self) -> str:
        numbers = [is_number for _, is_number in _HEAD]
        rows = [list(zip(row, numbers, strict=True)) for row in self._rows]
        good = [entry.fits for _, entry in sorted(self.tried.items())]
        return (
            f'<div style="overflow-x:auto"><p>{escaping.escape(self._headline)}</p>'
            f"{html_table(_HEAD, rows, good)}</div>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "batch": self.batch,
            "entry": self.entry.to_dict(),
            "tried": {str(batch): entry.to_dict() for batch, entry in sorted(self.tried.items())},
        }

    @property
    def _headline(self) -> str:
        return f"{self.entry.target}: the largest batch is {self.batch}"

    @property
    def _rows(self) -> list[list[str]]:
        return [
            [str(batch), size(entry.peak_bytes), "fits" if entry.fits else "does not fit"]
            for batch, entry in sorted(self.tried.items())
        ]


def search(
    compile_batch: Callable[[int], PreflightEntry], *, multiple_of: int, maximum: int
) -> LargestBatch:
    """Find the largest multiple of `multiple_of` that fits.

    Doubling finds a batch that fits and one that does not. Between the two, memory grows almost
    linearly, so the next batch tried is where the line meets the limit. If a compiler gave up and
    gave no figure, or if the line was wrong before, the next batch is the middle.
    """
    tried: dict[int, PreflightEntry] = {}

    def fits(units: int) -> bool:
        batch = units * multiple_of
        if batch not in tried:
            tried[batch] = compile_batch(batch)
        return tried[batch].fits

    if multiple_of < 1 or maximum < multiple_of:
        raise PreflightError(
            "multiple_of must be at least 1 and maximum at least multiple_of; "
            f"got {multiple_of} and {maximum}."
        )
    if not fits(1):
        entry = tried[multiple_of]
        raise DoesNotFitError(
            f"not even a batch of {multiple_of} fits on {entry.target}: it needs "
            f"{size(entry.peak_bytes)} of {size(entry.usable_bytes)} usable. "
            f"Try more devices, or a smaller model. {' '.join(entry.notes)}".rstrip()
        )
    # Both count multiples. `low` is known to fit; `high` is tried next, until one does not fit.
    low, high = 1, 2
    top = maximum // multiple_of
    while high <= top and fits(high):
        low, high = high, 2 * high
    if high > top:
        if low == top or fits(top):
            low = top
            high = top + 1
        else:
            high = top
    # A compile takes tens of seconds. Bisection needs one compile per bit of the answer, while the
    # line most often needs two. The line is trusted while each round at least halves the bracket,
    # as bisection would: memory has jumps where the compiler decides differently for a larger
    # batch.
    straight = True
    while high - low > 1:
        width = high - low
        middle = (low + high) // 2
        if straight:
            guess = _crossing(tried, low * multiple_of, high * multiple_of)
            if guess is not None:
                # If the line is right, a batch below the guess and then one above it close the
                # bracket.
                middle = min(max(guess // multiple_of, low + 1), high - 1)
        if fits(middle):
            low = middle
            if straight and high - low > 1 and not fits(low + 1):
                high = low + 1
            elif straight and high - low > 1:
                low = low + 1
        else:
            high = middle
        straight = straight and (high - low) * 2 <= width
    best = low * multiple_of
    return LargestBatch(best, tried[best], dict(sorted(tried.items())))


def _crossing(tried: dict[int, PreflightEntry], low: int, high: int) -> int | None:
    """Return the batch at which the line through two compiled ones reaches the usable memory."""
    points = [(b, tried[b].peak_bytes) for b in (low, high) if b in tried]
    if len(points) < 2 or any(peak is None for _, peak in points):
        return None
    (b0, p0), (b1, p1) = points
    if p0 is None or p1 is None or p1 <= p0:
        return None
    return int(b0 + (tried[low].usable_bytes - p0) * (b1 - b0) / (p1 - p0))
