"""Keep numbers step by step, in constant memory."""

import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np

# The numbers that the live view knows by name; all others are the user's own.
LOSS, SCALE, SKIPPED, IN_A_ROW = "loss", "loss_scale", "skipped", "skipped_in_a_row"
UNDERFLOW, OVERFLOW = "underflow", "overflow"
KNOWN = (LOSS, SCALE, SKIPPED, IN_A_ROW, UNDERFLOW, OVERFLOW)


class Part(IntEnum):
    """The statistics of a number that a point keeps, by position."""

    COUNT = 0
    """How often the number was given and finite."""
    TOTAL = 1
    """The sum of the finite values."""
    LOW = 2
    """The lowest finite value; infinite if there is none."""
    HIGH = 3
    """The highest finite value; minus infinity if there is none."""
    LAST = 4
    """The last value that was given, finite or not; NaN if there is none."""
    BAD = 5
    """How often the number was given and not finite."""


_MOST = 2**20
# In the order of `Part`.
_EMPTY = (0.0, 0.0, math.inf, -math.inf, math.nan, 0.0)


class History:
    """Points of one update each; once there are too many, of two updates, then four, and so on.

    Args:
        points: The maximum number of points, an even number.

    Attributes:
        width: How many updates a point covers.
        updates: How many updates were added in all.
        last: The newest step; -1 if there is none.
    """

    def __init__(self, points: int):
        if points != int(points) or not 2 <= points <= _MOST or points % 2:
            raise ValueError(f"`points` must be an even number from 2 to {_MOST:,}; got {points}.")
        self.width, self.updates, self.last = 1, 0, -1
        self._steps = np.zeros(points, np.int64)
        self._parts: dict[str, np.ndarray] = {}
        self._size = self._filled = 0

    def __len__(self) -> int:
        return self._size

    @property
    def names(self) -> tuple[str, ...]:
        """The numbers that were given, in the order in which they came."""
        return tuple(self._parts)

    @property
    def steps(self) -> np.ndarray:
        """The first step of each point."""
        return self._steps[: self._size]

    def part(self, name: str, which: Part) -> np.ndarray:
        """Return one statistic of a number, point by point."""
        return self._parts[name][: self._size, which]

    def mean(self, name: str) -> np.ndarray:
        """Return the mean of a number in each point; NaN where no value is finite."""
        count = self.part(name, Part.COUNT)
        made = np.full(len(self), np.nan)
        np.divide(self.part(name, Part.TOTAL), count, out=made, where=count > 0)
        return made

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add an update. A step lower than the last one drops the steps from there on."""
        # After a restore from a checkpoint, the later steps never happened. They stay only in a
        # point that began before the restored step: a point is a sum and cannot be split.
        if self._size and step < self.last:
            while self._size and self._steps[self._size - 1] >= step:
                self._size -= 1
            self._filled = self.width
        if not self._size or (self._filled >= self.width and step != self.last):
            self._begin(step)
        # A step that several updates describe counts once.
        self._filled += step != self.last
        self.last = step
        self.updates += 1
        at = self._size - 1
        for name, value in numbers.items():
            if name not in self._parts:
                self._parts[name] = np.tile(np.asarray(_EMPTY), (len(self._steps), 1))
            row = self._parts[name][at]
            row[Part.LAST] = value
            if math.isfinite(value):
                row[Part.COUNT] += 1
                row[Part.TOTAL] += value
                row[Part.LOW] = min(row[Part.LOW], value)
                row[Part.HIGH] = max(row[Part.HIGH], value)
            else:
                row[Part.BAD] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values; `None` where there is nothing."""
        numbers = {
            name: {
                "mean": _plain(self.mean(name)),
                "low": _plain(self.part(name, Part.LOW)),
                "high": _plain(self.part(name, Part.HIGH)),
                "last": _plain(self.part(name, Part.LAST)),
                "not_finite": [int(count) for count in self.part(name, Part.BAD)],
            }
            for name in self.names
        }
        return {
            "updates": self.updates,
            "updates_in_a_point": self.width,
            "steps": [int(step) for step in self.steps],
            "numbers": numbers,
        }

    def _begin(self, step: int) -> None:
        if self._size == len(self._steps):
            self._halve()
        self._steps[self._size] = step
        for parts in self._parts.values():
            parts[self._size] = _EMPTY
        self._size += 1
        self._filled = 0

    def _halve(self) -> None:
        """Merge every two points into one."""
        # Each time, the number of updates until the next merge doubles, so the mean cost of an
        # update does not depend on the length of the run.
        half = self._size // 2
        self._steps[:half] = self._steps[::2]
        for parts in self._parts.values():
            first, second = parts[::2].copy(), parts[1::2].copy()
            merged = parts[:half]
            for which in (Part.COUNT, Part.TOTAL, Part.BAD):
                merged[:, which] = first[:, which] + second[:, which]
            merged[:, Part.LOW] = np.minimum(first[:, Part.LOW], second[:, Part.LOW])
            merged[:, Part.HIGH] = np.maximum(first[:, Part.HIGH], second[:, Part.HIGH])
            given = second[:, Part.COUNT] + second[:, Part.BAD] > 0
            merged[:, Part.LAST] = np.where(given, second[:, Part.LAST], first[:, Part.LAST])
        self._size = half
        self.width *= 2


def _plain(values: np.ndarray) -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in values]
