"""The numbers of a value."""

import dataclasses
import math

import numpy as np

from halfstep.debug._stats import Column


@dataclasses.dataclass(frozen=True)
class Range:
    """The numbers of a value.

    Attributes:
        absmax: The largest magnitude; infinite or NaN if any element is.
        smallest: The smallest magnitude that is not zero; infinite if all elements are zero.
        bad: How many elements are not finite.
        low: The smallest finite element; NaN if it was not recorded.
        high: The largest finite element; NaN if it was not recorded.
        zeros: How many elements are zero; NaN if it was not recorded.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        found = halfstep.debug.first_nonfinite(jnp.log, jnp.array([4.0, 0.0, 0.5]))
        given = found.operands[0].range
        assert (given.low, given.high, given.smallest) == (0, 4, 0.5)
        assert given.zeros == 1 and given.bad == 0
        ```
    """

    absmax: float
    smallest: float
    bad: int
    low: float
    high: float
    zeros: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            parts = [f"magnitudes {self.smallest:.3g} to {self.absmax:.3g}"]
        elif self.low > self.high:
            parts = ["nothing finite"]
        else:
            parts = [f"{self.low:.3g} to {self.high:.3g}"]
            if self.zeros:
                parts.append(f"{self.zeros:.0f} zeros")
            if math.isfinite(self.smallest):
                parts.append(f"smallest magnitude {self.smallest:.3g}")
        if self.bad:
            parts.append(f"{self.bad} not finite")
        return ", ".join(parts)


def range_of(row: np.ndarray, *, finite: bool = False) -> Range:
    """The numbers of a recorded value; of the time before it was not finite, if that is asked."""
    largest = np.maximum(abs(row[Column.LOW]), abs(row[Column.HIGH]))
    return Range(
        float(largest if finite else row[Column.ABSMAX]),
        float(row[Column.SMALLEST]),
        0 if finite else int(row[Column.BAD]),
        float(row[Column.LOW]),
        float(row[Column.HIGH]),
        float(row[Column.ZEROS]),
    )
