"""The log: a ring of rows, as a pytree."""

import os
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from halfstep.debug._instrument.layout import Layout
from halfstep.debug._instrument.site import Site
from halfstep.debug._instrument.stats import EMPTY
from halfstep.debug._record.report import DebugReport, report


class Log(eqx.Module):
    """What the last steps have recorded: an array, to be handed from step to step.

    It is made by `init` of what `debug.record` returns. On many devices it is the same on all.

    Attributes:
        rows: Numbers of each site in each of the last steps, as `[steps, sites, columns]`.
        step: How many steps were recorded.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        recorder = halfstep.debug.record(lambda x: x * 100, last=4)
        x = jnp.ones(2)
        log = recorder.init(x)
        for _ in range(6):
            log, x = jax.jit(recorder)(log, x)
        assert log.step == 6 and log.rows.shape[:2] == (4, len(log.sites))
        assert log.report().steps == (2, 3, 4, 5)
        ```
    """

    rows: Float[Array, "steps sites columns"]
    step: Int[Array, ""]
    layout: Layout = eqx.field(static=True, repr=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        """What is recorded, in the order of the rows."""
        return self.layout.sites

    def after(self, rows: jax.Array) -> "Log":
        """The log with the rows of one more step, in place of the oldest."""
        place = self.step % self.rows.shape[0]
        return Log(self.rows.at[place].set(rows), self.step + 1, self.layout)

    def report(self, *, step: int | None = None) -> DebugReport:
        """Say where it began, and what came before. Waits for the arrays.

        Args:
            step: The step that is looked at, counted from 0; without it, the first one among those
                that are kept in which anything is not finite, or the last one if all is.

        Raises:
            ValueError: If the step is not kept.
        """
        count, kept = int(self.step), self.rows.shape[0]
        steps = range(max(0, count - kept), count)
        rows = np.asarray(self.rows)[[number % kept for number in steps]]
        return report(self.layout, rows, steps, step)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw sites and steps as a map of magnitudes, into a PNG; see `DebugReport.plot`."""
        self.report().plot(path)


def new_log(layout: Layout, last: int) -> Log:
    """A log without steps."""
    row: Any = np.asarray(EMPTY + (-1.0,) * layout.loops, np.float32)
    rows = jnp.asarray(np.tile(row, (last, len(layout.sites), 1)))
    return Log(rows, jnp.zeros((), jnp.int32), layout)
