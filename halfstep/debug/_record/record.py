"""`record`: make a training step keep a log of its numbers."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from halfstep._base import checked, is_inexact, parse_dtype, type_of
from halfstep.debug._instrument.layout import InstrumentedCall, Layout, Sites, instrument
from halfstep.debug._instrument.run import run
from halfstep.debug._instrument.site import Site
from halfstep.debug._instrument.stats import EMPTY, Numbers
from halfstep.debug._record.debug_report import DebugReport, report


class Log(eqx.Module):
    """The numbers that the last steps have recorded: an array that is passed from step to step.

    The `init` method of a `debug.Recorder` creates the log. With many devices, the log is the same
    on all of them.

    Attributes:
        rows: The numbers of each site in each of the last steps, as `[steps, sites, columns]`.
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
        """The recorded sites, in the order of the rows."""
        return self.layout.sites

    def after(self, rows: jax.Array) -> "Log":
        """Return the log with the rows of one more step in place of the oldest rows."""
        # The rows are a ring buffer: nothing moves, so XLA updates a donated log in place.
        place = self.step % self.rows.shape[0]
        return Log(self.rows.at[place].set(rows), self.step + 1, self.layout)

    @checked
    def report(self, *, step: int | None = None) -> DebugReport:
        """Report where non-finite values began, and the steps before. Waits for the arrays.

        Args:
            step: The step to report, counted from 0. By default, the first kept step in which
                anything is not finite, or the last step if everything is finite.

        Raises:
            ValueError: If the step is not kept.
        """
        count, kept = int(self.step), self.rows.shape[0]
        steps = range(max(0, count - kept), count)
        rows = np.asarray(self.rows)[[number % kept for number in steps]]
        return report(self.layout, rows, steps, step)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw a map of magnitudes over sites and steps into a PNG file; see `DebugReport.plot`."""
        self.report().plot(path)


def new_log(layout: Layout, last: int) -> Log:
    """Create a log without steps."""
    row = np.asarray(EMPTY + (-1.0,) * layout.loops, np.float32)
    rows = jnp.asarray(np.tile(row, (last, len(layout.sites), 1)))
    return Log(rows, jnp.zeros((), jnp.int32), layout)


class Recorder:
    """A function that keeps a log: `recorder(log, *args)` returns the log and the result.

    `debug.record` creates it. Compile it with `jax.jit`; otherwise every operation runs separately.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        recorder = halfstep.debug.record(lambda w, x: w - 0.1 * x)
        assert isinstance(recorder, halfstep.debug.Recorder)
        w, x = jnp.ones(2), jnp.ones(2)
        log = recorder.init(w, x)
        log, w = jax.jit(recorder)(log, w, x)
        assert log.step == 1 and jnp.allclose(w, 0.9)
        ```
    """

    @checked
    def __init__(
        self, func: Callable[..., Any], sites: Sites, last: int, compute: DTypeLike | None
    ):
        functools.update_wrapper(self, func, updated=())
        self._func = func
        self._sites: Sites = sites
        self._last = last
        self._compute = None if compute is None else parse_dtype(compute)

    def init(self, *args: Any, **kwargs: Any) -> Log:
        """Create a log without steps, for arguments of these shapes and dtypes.

        Args:
            *args: The arguments of the function; arrays may be `jax.ShapeDtypeStruct`. Nothing is
                computed.
            **kwargs: The same, by name.
        """
        return new_log(self._trace(args, kwargs).layout, self._last)

    def __call__(self, log: Log, *args: Any, **kwargs: Any) -> tuple[Log, Any]:
        """Run one step.

        Args:
            log: The log from `init` or from the previous step.
            *args: The arguments of the function.
            **kwargs: The same, by name.
        """
        traced = self._trace(args, kwargs)
        if not isinstance(log, Log):
            raise TypeError(
                "the first argument of a recorded function is its log, as `init(*args)` makes it; "
                f"got {type(log).__name__}"
            )
        _check_sites(log.sites, traced.layout.sites)
        arrays = [_whole_step(array) for array in traced.call.arrays]
        results, rows = run(traced.layout, traced.layout.body, arrays, Numbers(traced.compute))
        # The log keeps its own layout although the new one has the same sites: a layout is static
        # and compared by identity, so a new one in each step would recompile each step.
        return log.after(rows), traced.call.rebuild(results)

    def _trace(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> InstrumentedCall:
        return instrument(self._func, args, kwargs, sites=self._sites, compute=self._compute)


@checked
def record(
    step: Callable[..., Any],
    *,
    sites: Sites = "scopes",
    last: int = 32,
    compute: DTypeLike | None = None,
) -> Recorder:
    """Make a training step keep a log of its numbers, like a flight recorder.

    For every site and each of the last steps, the log has the largest magnitude, the smallest
    magnitude that is not zero, the number of elements that are not finite, and the shares of
    elements below and above the range of the compute dtype. The log is an array that is passed from
    step to step, without callbacks to the host. `log.report()` says where non-finite values began.

    Args:
        step: The whole step: loss, gradients and update. It cannot be differentiated afterwards.
        sites: `"scopes"` records the values passed from one line of your code, or one
            `jax.named_scope`, to another in the forward and the backward pass. It also records the
            values that the update returns, and the arguments that do not go from step to step.
            `"ops"` records the result of every operation. A function is given a `debug.Site` for
            each of these results and returns whether to record it.
        last: How many steps are kept.
        compute: The dtype whose range the numbers are compared with. By default, float16 if the
            step has it anywhere, else bfloat16 if the step has that dtype.

    Returns:
        A function of the log and the step's own arguments; its `init` creates the log.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def step(w, x):
            loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.log(x @ w)))(w)
            return w - 0.5 * grad, loss


        recorder = halfstep.debug.record(step)
        run = jax.jit(recorder)
        w, x = jnp.ones(2), jnp.ones((4, 2))
        log = recorder.init(w, x)
        for _ in range(5):
            log, (w, loss) = run(log, w, x)
        report = log.report()
        assert report.step == 3 and "log" in report.found.between
        ```
    """
    if last < 1:
        raise ValueError(f"last must be at least 1, got {last}")
    return Recorder(step, sites, last, compute)


@jax.custom_jvp
def _identity(x: jax.Array) -> jax.Array:
    return x


@_identity.defjvp
def _(primals: Sequence[jax.Array], tangents: Sequence[object]) -> NoReturn:
    raise TypeError(
        f"a recorded function cannot be differentiated, here by an argument {type_of(primals[0])}: "
        "record the whole step, with the gradient inside, as "
        "`debug.record(lambda params, batch: jax.grad(loss)(params, batch))`"
    )


def _whole_step(array: jax.Array) -> jax.Array:
    # The recorded program drops custom derivatives (`custom_vjp`), so its gradient could be
    # silently wrong. Differentiating it is an error instead.
    return _identity(array) if is_inexact(array) else array


def _check_sites(before: Sequence[Site], now: Sequence[Site]) -> None:
    if before != now:
        known, new = set(before), set(now)
        gone = next((site for site in before if site not in new), None)
        come = next((site for site in now if site not in known), None)
        raise ValueError(
            "the log is of another function, or of arguments of other shapes or dtypes: it has "
            f"{len(before)} sites and the function {len(now)}; only the log has: {gone}; only the "
            f"function has: {come}. Make a new one with `init(*args)`"
        )
