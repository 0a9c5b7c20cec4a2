"""What a log says."""

import dataclasses
import os
from typing import Any

import numpy as np

from halfstep._reports import Report
from halfstep.debug._finding import NonFinite, finding
from halfstep.debug._html import html
from halfstep.debug._layout import Layout
from halfstep.debug._origin import origin
from halfstep.debug._parents import Parents
from halfstep.debug._plot import plot
from halfstep.debug._site import Site
from halfstep.debug._stats import Column
from halfstep.debug._text import text

# How many of the sites before the first bad one are shown.
_UPSTREAM = 8


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


@dataclasses.dataclass(frozen=True, repr=False)
class DebugReport(Report):
    """Where it began, and what came before.

    `print(report)` shows the first bad site, what to do, and the last steps at it and before it; a
    notebook shows the same as HTML.

    Attributes:
        steps: The numbers of the steps that are kept.
        bad_steps: Those in which anything was not finite.
        step: The step that was looked at; `None` if the log has none.
        found: Where it began in that step; `None` if all was finite.
        shown: The sites that the report is about: the first bad one and those it is made of, the
            nearest first; if all is finite, those nearest to what the compute dtype can hold.
        sites: All sites, in the order of a run.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        recorder = halfstep.debug.record(lambda x: jnp.log(x))
        x = jnp.full(2, 2.0)
        log = recorder.init(x)
        for _ in range(3):
            log, x = jax.jit(recorder)(log, x)
        report = log.report()
        assert isinstance(report, halfstep.debug.DebugReport)
        assert report.steps == (0, 1, 2) and report.bad_steps == (2,)
        assert report.step == 2 and report.found.kind == "nan"
        ```
    """

    steps: tuple[int, ...]
    bad_steps: tuple[int, ...]
    step: int | None
    found: NonFinite | None
    shown: tuple[Trace, ...]
    sites: tuple[Trace, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return html(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {
            "steps": list(self.steps),
            "bad_steps": list(self.bad_steps),
            "step": self.step,
            "found": None if self.found is None else self.found.to_dict(),
            "shown": [trace.to_dict() for trace in self.shown],
            "sites": [trace.to_dict() for trace in self.sites],
        }

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw sites and steps as a map of magnitudes, into a PNG.

        What is not finite is red. If there are too many sites for a page, those that are shown in
        the report stay, and of the others those that are nearest to the range's ends.

        Args:
            path: The file. Needs `halfstep[plot]`.
        """
        plot(self, path)


def report(layout: Layout, rows: np.ndarray, steps: range, step: int | None) -> DebugReport:
    """What the rows of some steps say.

    Args:
        layout: Of the program.
        rows: `[steps, sites, columns]`.
        steps: Their numbers.
        step: The one that is looked at; `None` for the first bad one, or the last.
    """
    if step is not None and step not in steps:
        kept = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise ValueError(f"step {step} is not in the log, which has: {kept}")
    bad = [steps[at] for at, row in enumerate(rows) if (row[:, Column.BAD] > 0).any()]
    if step is None and steps:
        step = bad[0] if bad else steps[-1]
    traces = tuple(_trace(site, rows[:, number]) for number, site in enumerate(layout.sites))
    found, shown = None, []
    if step is not None:
        at = rows[steps.index(step)]
        began = origin(layout, at)
        if began is None:
            shown = _nearest(at)
        else:
            found = finding(layout, at, began)
            shown = _upstream(layout, began.row)
    return DebugReport(
        tuple(steps), tuple(bad), step, found, tuple(traces[number] for number in shown), traces
    )


def _trace(site: Site, rows: np.ndarray) -> Trace:
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


def _upstream(layout: Layout, row: int) -> list[int]:
    """A site and those that it is made of, the nearest first."""
    parents = Parents(layout)
    found, at = [row], 0
    while at < len(found) and len(found) <= _UPSTREAM:
        turns = (0.0,) * len(layout.sites[found[at]].loops)
        for value, _ in parents.of_site(found[at], turns):
            if isinstance(value, int) and value not in found:
                found.append(value)
        at += 1
    return found[: _UPSTREAM + 1]


def _nearest(rows: np.ndarray) -> list[int]:
    """The sites that lose most of their numbers to the compute dtype's range."""
    lost = rows[:, Column.BELOW] + rows[:, Column.ABOVE]
    order = np.argsort(-lost, kind="stable")
    return [int(number) for number in order[: _UPSTREAM + 1] if lost[number] > 0]
