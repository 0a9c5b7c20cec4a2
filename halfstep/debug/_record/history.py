"""A site in the last steps of a log."""

import dataclasses
from typing import Any

import numpy as np

from halfstep.debug._instrument.site import Site
from halfstep.debug._instrument.stats import Column


@dataclasses.dataclass(frozen=True)
class Trace:
    """A site in the last steps.

    Attributes:
        site: What and where it is.
        absmax: The largest magnitude in each step; infinite or NaN if an element was.
        smallest: The smallest magnitude that is not zero.
        bad: How many elements were not finite.
        below: The share of elements below the compute dtype's smallest normal number.
        above: The share of elements above its largest.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        recorder = halfstep.debug.record(lambda x: x * 100, compute="float16")
        x = jnp.ones(2)
        log = recorder.init(x)
        for _ in range(3):
            log, x = jax.jit(recorder)(log, x)
        trace = log.report().sites[-1]
        assert isinstance(trace, halfstep.debug.Trace)
        assert trace.absmax == (1e2, 1e4, 1e6)
        assert trace.above == (0, 0, 1)
        ```
    """

    site: Site
    absmax: tuple[float, ...]
    smallest: tuple[float, ...]
    bad: tuple[int, ...]
    below: tuple[float, ...]
    above: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**dataclasses.asdict(self), "site": self.site.to_dict()}


def trace_of(site: Site, rows: np.ndarray) -> Trace:
    """A site in the steps whose rows are given."""

    def column(which: Column) -> tuple[float, ...]:
        return tuple(float(number) for number in rows[:, which])

    return Trace(
        site,
        column(Column.ABSMAX),
        column(Column.SMALLEST),
        tuple(int(number) for number in rows[:, Column.BAD]),
        column(Column.BELOW),
        column(Column.ABOVE),
    )
