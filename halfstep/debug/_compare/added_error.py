"""Attribute errors to sites: how much each adds to the error of the values it is computed from."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from halfstep.debug._compare.distance import distance, was_computed
from halfstep.debug._instrument.ancestors import ANY, Parents, Turns
from halfstep.debug._instrument.layout import Layout


def gain(error: float, before: float) -> float:
    """Return how much error is new. Errors count up to 100 %, even if the value is NaN."""
    return max(min(error, 1.0) - min(before, 1.0), 0.0)


class Added(NamedTuple):
    """The facts about a site in addition to its own error."""

    before: float
    """The largest error among the sites that it is computed from; in a loop, in `turn` below."""
    turns: tuple[float, ...] = ()
    """For a site in a loop, the error in each iteration that computed it."""
    turn: int | None = None
    """The index in `turns` of the iteration that adds the most error."""


class Errors:
    """The errors of all sites in all iterations."""

    def __init__(self, layout: Layout, rows: Sequence[np.ndarray]) -> None:
        self._layout, self._rows = layout, rows
        self._parents = Parents(layout)
        self._backwards = [self._parents.runs_backwards(body) for body, _ in layout.owners]

    def added(self, number: int) -> Added:
        """Find how much error a site adds, and in which iteration."""
        row, loops = self._rows[number], len(self._layout.sites[number].loops)
        if row.ndim == 1:
            return Added(self._before(number, (0.0,) * loops))
        # A site in a branch inside a loop is computed in some iterations only.
        flat = row.reshape(-1, row.shape[-1])
        places = [place for place, one in enumerate(flat) if was_computed(one)]
        errors = [distance(flat[place]).error for place in places]
        if row.ndim - 1 != loops:
            # All iterations of a `while` share one row, so the iteration is not known.
            before, best = self._before(number, (0.0,) * loops), int(np.argmax(errors))
            return Added(before, tuple(errors), best)
        times = [
            self._turns(number, [int(at) for at in np.unravel_index(place, row.shape[:-1])])
            for place in places
        ]
        before, best, most, highest = 0.0, 0, -1.0, -1.0
        # Error from earlier iterations is carried along, so error is new only where it rises.
        for at in sorted(range(len(places)), key=times.__getitem__):
            if errors[at] <= highest:
                continue
            highest = errors[at]
            given = self._before(number, times[at])
            if gain(highest, given) > most:
                before, best, most = given, at, gain(highest, given)
        return Added(before, tuple(errors), best)

    def _turns(self, number: int, index: Sequence[int]) -> Turns:
        """Convert positions among the rows to iterations in running order, or back."""
        sizes, flips = self._rows[number].shape[:-1], self._backwards[number]
        return tuple(
            float(size - 1 - at if flip else at)
            for at, size, flip in zip(index, sizes, flips, strict=True)
        )

    def _before(self, number: int, turns: Turns) -> float:
        found = [
            self._error(value, at)
            for value, at in self._parents.of_site(number, turns)
            if isinstance(value, int) and (value, at) != (number, turns)
        ]
        return max(found, default=0.0)

    def _error(self, number: int, turns: Turns) -> float:
        """Return the error of a site in the given iterations, or over all if rows merge them."""
        row = self._rows[number]
        if row.ndim > 1 and row.ndim - 1 == len(turns):
            sizes = row.shape[:-1]
            last = [
                size - 1 if at == ANY else int(at) for at, size in zip(turns, sizes, strict=True)
            ]
            row = row[tuple(int(at) for at in self._turns(number, last))]
        return distance(row).error
