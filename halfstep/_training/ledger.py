"""Count applied and skipped steps, and raise after too many skips in a row."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from halfstep._base import checked, with_values
from halfstep._training.f8_scaling import F8Scaling
from halfstep._training.verdict import Verdict, as_predicate


class SkipLimitError(RuntimeError):
    """Too many steps in a row were skipped to expect that the next one is different.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        ledger = halfstep.Ledger(limit=1).record(jnp.asarray(False))
        try:
            ledger.check()
        except halfstep.SkipLimitError as error:
            message = str(error)
        assert "skipped" in message
        ```
    """


class Ledger(eqx.Module):
    """Counts applied and skipped steps. A pytree that is committed with the rest of the step.

    Args:
        limit: The number of skips in a row after which `check` raises; `None` for never.
        fallbacks: The products that `review` has recorded, for a ledger that is restored.

    Attributes:
        applied: Steps applied.
        skipped: Steps skipped.
        consecutive: Skips since the last applied step.
        last_skipped: Index of the last skipped step, counted from 0; -1 if there is none.
        bad_losses: Skips whose loss was itself not finite (data or forward pass, not the scale).
        last_leaf: Index of the first non-finite gradient leaf in the last skipped step, or -1.
        fallbacks: Products that `review` has taken out of 8 or 4 bits, each with the step after
            which it did so: `(("up", 1200),)`.

    Example:
        ```python
        import halfstep

        ledger = halfstep.Ledger(limit=100)
        for finite in (True, False, True):
            ledger = ledger.record(finite)
        assert (ledger.applied, ledger.skipped, ledger.last_skipped) == (2, 1, 1)
        ledger.check()
        ```
    """

    applied: Int[Array, "..."]
    skipped: Int[Array, "..."]
    consecutive: Int[Array, "..."]
    last_skipped: Int[Array, "..."]
    bad_losses: Int[Array, "..."]
    last_leaf: Int[Array, "..."]
    limit: int | None = eqx.field(static=True)
    # Static, as the scaling's `off` is: a step is recompiled when a product falls back.
    fallbacks: tuple[tuple[str, int], ...] = eqx.field(static=True)

    @checked
    def __init__(self, *, limit: int | None = None, fallbacks: tuple[tuple[str, int], ...] = ()):
        if limit is not None and (limit != int(limit) or limit < 1):
            raise ValueError(f"`limit` must be None or an integer, 1 or more; got {limit}.")
        self.limit = limit
        self.fallbacks = fallbacks
        # One buffer each: donating a ledger must not donate the same buffer twice.
        self.applied, self.skipped, self.consecutive, self.bad_losses = (
            jnp.array(0, jnp.int32) for _ in range(4)
        )
        self.last_skipped, self.last_leaf = (jnp.array(-1, jnp.int32) for _ in range(2))

    def __repr__(self) -> str:
        return with_values(self)

    @property
    def steps(self) -> Array:
        """Steps seen, applied or not."""
        return self.applied + self.skipped

    def record(self, finite: Any) -> "Ledger":
        """Return the ledger after one more step.

        Args:
            finite: A boolean scalar or a `Verdict`; an unchecked verdict counts as applied.
        """
        predicate = as_predicate(finite)
        # A step that was not checked was applied: the gate has no other choice either.
        ok = True if predicate is None else predicate
        one = jnp.asarray(ok, jnp.int32)
        bad_loss, leaf = jnp.int32(0), jnp.int32(-1)
        if isinstance(finite, Verdict) and finite.checked:
            bad_loss = 1 - jnp.asarray(finite.loss_finite, jnp.int32)
            leaf = jnp.asarray(finite.first_leaf)
        values = (
            self.applied + one,
            self.skipped + (1 - one),
            jnp.where(ok, 0, self.consecutive + 1),
            jnp.where(ok, self.last_skipped, self.steps),
            self.bad_losses + bad_loss,
            jnp.where(ok, self.last_leaf, leaf),
        )
        return eqx.tree_at(_counters, self, values)

    def review(self, scaling: F8Scaling) -> tuple[F8Scaling, "Ledger"]:
        """Take products that lose too much out of a recipe, on the host, and record it.

        `review` reads the counters, so it waits for the step: call it only when you log. A step
        function is recompiled if something has changed.

        Args:
            scaling: The recipe's state; see `F8Scaling.review`.

        Returns:
            The new state and the new ledger.
        """
        reviewed = scaling.review()
        new = [name for name in reviewed.off if name not in scaling.off]
        if not new:
            return scaling, self
        steps = int(np.asarray(self.steps))
        found = (*self.fallbacks, *((name, steps) for name in new))
        ledger = Ledger(limit=self.limit, fallbacks=found)
        return reviewed, eqx.tree_at(_counters, ledger, _counters(self))

    def check(self, tree: Any = None, *, scaling: Any = None) -> None:
        """Raise on the host if the limit of consecutive skips is reached.

        `check` reads the counters, so it waits for the step: call it only when you log.

        Args:
            tree: The gradients or the model, to name the offending leaf by its path.
            scaling: The loss scaling, to report the current scale.

        Raises:
            SkipLimitError: If the limit is reached; the message says what to look at.
        """
        consecutive = int(np.asarray(self.consecutive))
        if self.limit is None or consecutive < self.limit:
            return
        lines = [
            f"{consecutive} steps in a row were skipped (limit {self.limit}); "
            f"{int(np.asarray(self.applied))} applied and {int(np.asarray(self.skipped))} skipped "
            f"in all, the last skipped one is step {int(np.asarray(self.last_skipped))}."
        ]
        index = int(np.asarray(self.last_leaf))
        if index >= 0:
            # Make a verdict for the recorded leaf: it can name leaves by their number.
            known = Verdict(jnp.asarray(False), jnp.asarray(True), jnp.asarray(index, jnp.int32))
            named = f"number {index}" if tree is None else f"`{known.where(tree)}`"
            lines.append(f"The first gradient leaf that was not finite is {named}.")
        if scaling is not None:
            lines.append(f"The loss scale is {float(np.asarray(scaling.loss_scaling)):g}.")
        if int(np.asarray(self.bad_losses)):
            lines.append(
                f"In {int(np.asarray(self.bad_losses))} of the skipped steps the loss itself was "
                "not finite, which no loss scale cures. Look at (a) the batch: NaN, infinities, "
                "labels out of range; (b) the forward pass: sums, norms and exponentials in 16 "
                "bits (wrap them in force_full_precision); (c) parameters that are not finite."
            )
        else:
            lines.append(
                "The loss was finite each time. Look at (a) the scale: at its floor, lower "
                "min_loss_scaling; (b) the gradient's own size: clip, or lower the learning rate; "
                "(c) operations whose derivative is infinite, such as sqrt or norm at 0."
            )
        raise SkipLimitError("\n".join(lines))


def _counters(ledger: Ledger) -> tuple[Any, ...]:
    return (
        ledger.applied,
        ledger.skipped,
        ledger.consecutive,
        ledger.last_skipped,
        ledger.bad_losses,
        ledger.last_leaf,
    )
