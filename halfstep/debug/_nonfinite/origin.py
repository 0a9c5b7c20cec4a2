"""Search for the value at which non-finite values began."""

import dataclasses
from collections.abc import Iterable
from types import MappingProxyType

import numpy as np

from halfstep._program import Constant, Scan
from halfstep.debug._instrument.ancestors import Parents, Turns
from halfstep.debug._instrument.body import Body
from halfstep.debug._instrument.layout import Layout
from halfstep.debug._instrument.stats import Column

ORDER = MappingProxyType({"forward": 0, "backward": 1, "update": 2})
"""The order of the passes."""


@dataclasses.dataclass(frozen=True)
class NonFiniteOrigin:
    """Where non-finite values began."""

    row: int
    """The first value that is not finite while the values that it is computed from are."""
    nan: int | None
    """Where the values became NaN, if they were infinite before."""
    chain: tuple[int, ...]
    """Every value on one path from `row` to where the search started."""
    reaches: bool
    """Whether anything that is not finite reaches a result, or a check of a result."""


def origin(layout: Layout, rows: np.ndarray) -> NonFiniteOrigin | None:
    """Find where the non-finite values of one run began, or return `None` if all are finite."""
    return Search(layout, rows).find()


def turns_of(layout: Layout, rows: np.ndarray, row: int) -> tuple[int, ...]:
    """Return the iteration of each loop around a site in which it was first not finite."""
    loops = len(layout.sites[row].loops)
    return tuple(int(turn) for turn in rows[row, Column.TURN : Column.TURN + loops])


class Search:
    """The search among the values of one run."""

    def __init__(self, layout: Layout, rows: np.ndarray) -> None:
        self.layout, self.rows = layout, rows
        self.parents = Parents(layout)
        self.nan = np.isnan(rows[:, Column.ABSMAX])
        self.starts: dict[Body, tuple[tuple[int, int], ...]] = {}
        self._place(layout.body, ())
        self.found: dict[int, list[int]] = {}
        self.reached: tuple[int, ...] = ()
        """After `find`, the values from which it chose: all non-finite ones on the way."""

    def find(self) -> NonFiniteOrigin | None:
        """Find where non-finite values began, or return `None` if all are finite."""
        bad: list[int] = np.flatnonzero(self.rows[:, Column.BAD] > 0).tolist()
        if not bad:
            return None
        # The search starts at the results, since that is what the user saw. An infinity that is
        # masked on the way may be older, but is harmless.
        returned = self._bad_rows(self.parents.of_outputs())
        if returned:
            return self._from(returned, reaches=True)
        # Without a bad result, it starts at the end of each chain of bad values. A value that is
        # compared or checked has decided something, such as skipping the step; the others are
        # masked.
        used = {parent for row in bad for parent in self._above(row)}
        ends = [row for row in bad if row not in used]
        checked = [row for row in ends if self.parents.is_checked(row)]
        return self._from(checked or ends or bad, reaches=bool(checked))

    def _from(self, ends: list[int], *, reaches: bool) -> NonFiniteOrigin:
        # Maps each bad ancestor to the value through which it was found, so that walking back gives
        # the chain.
        below: dict[int, int | None] = dict.fromkeys(ends)
        waiting = list(ends)
        while waiting:
            row = waiting.pop()
            for parent in self._above(row):
                if parent not in below:
                    below[parent] = row
                    waiting.append(parent)
        first = min((r for r in below if not self._above(r)), key=self._time, default=None)
        if first is None:
            # A cycle: each value has another one before it, because a loop hands them around.
            first = min(below, key=self._time)
        # An infinity often becomes NaN later, as in `inf - inf`, and the NaN is what people search
        # for.
        began = [r for r in below if self.nan[r] and not self.nan[self._above(r)].any()]
        nan = min(began, key=self._time, default=None)
        chain = [first]
        while (after := below[chain[-1]]) is not None and after not in chain:
            chain.append(after)
        self.reached = tuple(below)
        return NonFiniteOrigin(first, None if nan == first else nan, tuple(chain), reaches)

    def _above(self, row: int) -> list[int]:
        """Return the non-finite values that a value is computed from."""
        if row not in self.found:
            made_of = self._bad_rows(self.parents.of_site(row, self._turns(row)))
            self.found[row] = [parent for parent in made_of if parent != row]
        return self.found[row]

    def _bad_rows(self, values: Iterable[tuple[int | Constant, Turns]]) -> list[int]:
        """Return the rows of those values that were not finite by the given iterations."""
        return sorted(
            {
                row
                for row, turns in values
                if not isinstance(row, Constant)
                and self.rows[row, Column.BAD] > 0
                # A row holds only the first iteration in which it was bad. If that comes after the
                # iteration in which the value was used, the value was still finite then. Tuples
                # compare in the order in which nested loops run.
                and self._turns(row)[: len(turns)] <= turns
            }
        )

    def _turns(self, row: int) -> Turns:
        """Return the iterations in which a value was first not finite, in running order."""
        body, _ = self.layout.owners[row]
        turns = turns_of(self.layout, self.rows, row)
        lengths = [length for _, length in self.starts[body]]
        # Rows count slices of the scanned arrays. A reversed scan, as in most backward passes,
        # starts with the last slice.
        return tuple(
            float(length - 1 - turn if length else turn)
            for turn, length in zip(turns, lengths, strict=True)
        )

    def _time(self, row: int) -> tuple[float | int, ...]:
        """Return a sort key for when a value was first not finite."""
        body, _ = self.layout.owners[row]
        # Factors of the backward pass are computed in the forward pass, and come after it here.
        key: list[float | int] = [ORDER[self.layout.sites[row].stage]]
        # Row numbers are ordered within one iteration. A late row of iteration 2 must come before
        # an early row of iteration 3, so the iteration goes first, after the position of the loop
        # itself.
        for (start, _), turn in zip(self.starts[body], self._turns(row), strict=True):
            key += [start, turn]
        return (*key, row)

    def _place(self, body: Body, around: tuple[tuple[int, int], ...]) -> None:
        """Note the loops around every function: first row inside, and the length if reversed."""
        self.starts[body] = around
        for index, bodies in body.inner.items():
            loop = body.graph.nodes[index].structure
            for inner in bodies:
                if len(inner.loops) > len(body.loops):
                    length = loop.length if isinstance(loop, Scan) and loop.reverse else 0
                    self._place(inner, (*around, (self._first_row(inner), length)))
                else:
                    self._place(inner, around)

    def _first_row(self, body: Body) -> int:
        inside = [self._first_row(inner) for bodies in body.inner.values() for inner in bodies]
        return min([*self.layout.rows[body].values(), *inside], default=len(self.rows))
