"""`Live`: show the numbers of a training loop while it runs."""

import collections
import math
import operator
import os
import time
from types import TracebackType
from typing import Any, SupportsIndex

import jax

from halfstep._base import Report, checked, type_of
from halfstep._training import Ledger, NoLossScaling
from halfstep.debug._live.history import (
    IN_A_ROW,
    LOSS,
    OVERFLOW,
    SCALE,
    SKIPPED,
    UNDERFLOW,
    History,
)
from halfstep.debug._live.panels import draw_panels
from halfstep.debug._live.read import Shares, Sites, Taken, Worst, check, take
from halfstep.debug._live.show import (
    Display,
    Style,
    display,
    headline,
    html_of,
    line_of,
    table_of,
    text_of,
    worst_line,
)
from halfstep.debug._record.record import Log

# At most this many updates may wait for the device. When there are more, the device has that many
# steps to do, and waiting for the first of them does not stall it.
_WAITING = 128
# Seconds between two lines: writing to a terminal takes longer than running a small step.
_PAUSE = 0.1


class Live(Report):
    """Shows a training loop's loss, loss scale, skips, underflow and overflow while it runs.

    `update` does not wait for the device: it keeps copies of the numbers, and reads them in a later
    call, once they are computed. The line is therefore one or more steps behind. The history takes
    constant memory: beyond `points`, neighboring points are merged into one, with their mean,
    lowest, highest and last value.

    With several processes, only process 0 keeps, shows and writes anything; the others may make the
    same calls.

    Args:
        style: `"tqdm"` or `"rich"` shows a separate line, which needs `halfstep[live]`. By default,
            nothing is shown; print `live.line` instead.
        bar: Your own tqdm bar; the line is written after it.
        every: Only steps that are a multiple of this number are used.
        points: The maximum number of points in the history.
        name_above: The line names the site that loses most if it loses more than this share of its
            elements.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        scaling, ledger = halfstep.DynamicLossScaling(2**15), halfstep.Ledger()
        with halfstep.debug.Live() as live:
            for step in range(10):
                finite = step != 7
                scaling, ledger = scaling.adjust(finite), ledger.record(finite)
                loss = jnp.float32(2) / (step + 1)
                live.update(step, loss=loss, scaling=scaling, ledger=ledger)
        assert live.line == "loss 0.2 | scale 2^14 | skipped 1 (0 in a row)"
        ```
    """

    @checked
    def __init__(
        self,
        *,
        style: Style | None = None,
        bar: Any = None,
        every: int = 1,
        points: int = 2048,
        name_above: float = 0.1,
    ):
        if every != int(every) or every < 1:
            raise ValueError(f"`every` must be an integer number of steps, 1 or more; got {every}.")
        self._every, self._name_above = int(every), name_above
        self._history = History(points)
        self._waiting: collections.deque[Taken] = collections.deque()
        self._latest: dict[str, float] = {}
        self._sites: Sites | None = None
        self._shares: Shares | None = None
        self._worst: dict[str, tuple[Worst, int]] = {}
        self._is_first = jax.process_index() == 0
        self._display: Display | None = display(style, bar) if self._is_first else None
        self._shown = -math.inf

    def __enter__(self) -> "Live":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error, updates that still wait may never be computed.
        self.close(wait=error is None)

    @property
    def step(self) -> int | None:
        """The newest step that was read; `None` if there is none."""
        return self._history.last if len(self._history) else None

    @property
    def latest(self) -> dict[str, float]:
        """The newest value of each number that was read, for TensorBoard, wandb and the like.

        The names are `loss`, `loss_scale`, `skipped`, `skipped_in_a_row`, `underflow` and
        `overflow`, as far as `update` was given their sources, and those of your own numbers.
        Reading `latest` does not wait for the device.
        """
        return dict(self._latest)

    @property
    def line(self) -> str:
        """The newest values on one line; empty if nothing was read. Does not wait."""
        return line_of(self._latest, self._shares, self._name_above)

    @checked
    def update(
        self,
        step: SupportsIndex,
        *,
        loss: Any = None,
        scaling: Any = None,
        ledger: Ledger | None = None,
        log: Log | None = None,
        **numbers: Any,
    ) -> bool:
        """Take what a step has returned, before the next step, and show what is computed by now.

        Call it on the host, after each step. Arrays may be donated to the next step afterwards. A
        step lower than the previous one, as after a restore, drops the history after that step.

        Args:
            step: The step's number, counted on the host.
            loss: The loss.
            scaling: The loss scaling.
            ledger: The ledger, which counts skipped steps.
            log: The log of a recorded step. It gives the underflow and overflow of the forward and
                the backward pass. Underflow is the share of elements that are below the compute
                dtype's smallest normal number but not zero. Overflow is the share of elements that
                are above its largest number or not finite. Only values of 16 bits or fewer count,
                or all values if there are none, by their size in one loop iteration on one shard.
            **numbers: Your own numbers, such as `accuracy`. Without `scaling` or `ledger`, you can
                give `loss_scale` and `skipped` here with the same meaning.

        Returns:
            Whether `latest` is now from another step.

        Raises:
            ValueError: If a number is an array with axes, was donated, or is not on process 0.
        """
        if isinstance(step, jax.Array):
            raise TypeError(
                f"`step` must be a number on the host; got an array, {type_of(step)}, and reading "
                "it would wait for the device. Count steps with `enumerate`."
            )
        number = operator.index(step)
        if number.bit_length() > 63:
            raise ValueError(f"`step` must have at most 63 bits; got {number.bit_length()}.")
        if number % self._every:
            return False
        given = _numbers(loss, scaling, ledger)
        made = {*given, *(() if log is None else (UNDERFLOW, OVERFLOW))}
        if twice := made & numbers.keys():
            raise ValueError(
                f"{', '.join(f'`{name}`' for name in sorted(twice))} is given twice: by name, and "
                "by `scaling`, `ledger` or `log`. Name it otherwise."
            )
        # All processes must raise for a mistake: if only the first one did, the others would wait
        # for it in the next collective.
        if not self._is_first:
            check({**given, **numbers}, log)
            return False
        sites = None if log is None else self._sites_of(log)
        self._waiting.append(take(number, {**given, **numbers}, log, sites))
        return self._read()

    def flush(self) -> None:
        """Wait for all updates, read them, and show the line."""
        self._read(wait=True)
        self._show(now=True)

    @checked
    def close(self, *, wait: bool = True) -> None:
        """Show the last line, and leave it on the screen. A bar of your own stays open.

        Args:
            wait: Whether to wait for updates that are not computed yet.
        """
        if wait:
            self.flush()
        else:
            self._read()
            self._show(now=True)
        if self._display is not None:
            self._display.close()
            self._display = None

    def summary(self) -> str:
        """Return a table of the run so far. Waits for all updates."""
        self.flush()
        return text_of(*self._parts())

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        self.flush()
        return html_of(*self._parts())

    def to_dict(self) -> dict[str, Any]:
        """Return the history as plain values. Waits for all updates."""
        self.flush()
        worst = {
            name: {"share": found.share, "step": step, "site": found.site.to_dict()}
            for name, (found, step) in self._worst.items()
        }
        return {
            "step": self.step,
            "latest": dict(self._latest),
            "worst": worst,
            **self._history.to_dict(),
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the history as JSON; process 0 also writes it to a file. Waits for all updates.

        Args:
            path: The file; without it, nothing is written.
        """
        return super().to_json(path if self._is_first else None)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the history into a PNG file, one panel per kind of number. Waits for all updates.

        Args:
            path: The file. Needs `halfstep[plot]`.
        """
        self.flush()
        if self._is_first:
            draw_panels(self._history, path)

    def _parts(self) -> tuple[str, list[list[str]], list[str]]:
        if not self._is_first:
            return "only process 0 keeps the numbers", [], []
        notes = [
            worst_line(name, *self._worst[name])
            for name in (UNDERFLOW, OVERFLOW)
            if name in self._worst
        ]
        return headline(self._history), table_of(self._history, self._latest), notes

    def _sites_of(self, log: Log) -> Sites:
        # Cached, because building it visits every site. A log from another `init` has other sites.
        if self._sites is None or self._sites.sites is not log.sites:
            self._sites = Sites(log.sites)
        return self._sites

    def _read(self, *, wait: bool = False) -> bool:
        """Read the updates that are computed, oldest first; return whether there were any."""
        found = False
        while self._waiting:
            taken = self._waiting[0]
            # Strictly in order, even if a later update is ready: a lower step means a restore to
            # the history.
            if not (wait or len(self._waiting) > _WAITING or taken.is_ready()):
                break
            self._waiting.popleft()
            self._keep(taken)
            found = True
        if found:
            self._show()
        return found

    def _keep(self, taken: Taken) -> None:
        numbers, shares = taken.read()
        if shares is not None:
            numbers |= {UNDERFLOW: shares.underflow, OVERFLOW: shares.overflow}
            self._shares = shares
            for name in (UNDERFLOW, OVERFLOW):
                worst: Worst = getattr(shares, f"most_{name}")
                before = self._worst.get(name)
                if worst.share > (0 if before is None else before[0].share):
                    self._worst[name] = worst, taken.step
        self._history.add(taken.step, numbers)
        self._latest |= numbers

    def _show(self, *, now: bool = False) -> None:
        if self._display is None or not (line := self.line):
            return
        moment = time.monotonic()
        # The display always gets the line: a tqdm bar also draws itself at other times.
        draw = now or moment - self._shown >= _PAUSE
        if draw:
            self._shown = moment
        bad_loss = not math.isfinite(self._latest.get(LOSS, 0.0))
        alarm = bad_loss or self._latest.get(IN_A_ROW, 0.0) > 0
        self._display.show(line, alarm=alarm, draw=draw)


def _numbers(loss: object, scaling: object, ledger: Ledger | None) -> dict[str, Any]:
    """Return the numbers that come from the training state, by name."""
    found: dict[str, Any] = {} if loss is None else {LOSS: loss}
    # The scaling of a recipe has a loss scaling of its own.
    if scaling is not None and not isinstance(getattr(scaling, "loss", scaling), NoLossScaling):
        scale = getattr(scaling, "loss_scaling", None)
        if scale is None:
            raise TypeError(
                "`scaling` must be a loss scaling, with an attribute `loss_scaling`; got "
                f"{type(scaling).__name__}. Give a scale of your own as `loss_scale`."
            )
        found[SCALE] = scale
    if ledger is not None:
        found |= {SKIPPED: ledger.skipped, IN_A_ROW: ledger.consecutive}
    return found
