"""Scale the loss, to keep small gradients inside the range of a 16-bit format."""

import abc
import math
from typing import Any, SupportsFloat, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from halfstep._base import at_least_float32, checked, described, is_inexact, with_values
from halfstep._training.verdict import as_predicate

T = TypeVar("T")

# Beyond these the reciprocal of a scale is no longer a normal float32.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


def power_of_two(value: SupportsFloat, name: str) -> float:
    """Validate a concrete scale. A power of two only moves the exponent: scaling never rounds."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"`{name}` must be a number, such as 2.0**15; got {described(value)}."
        ) from None
    if not (math.isfinite(number) and number > 0 and math.frexp(number)[0] == 0.5):
        below = 2.0 ** math.floor(math.log2(number)) if 0 < number < math.inf else 2.0**15
        raise ValueError(
            f"`{name}` must be a power of two, so that scaling is exact; got {number:g}. "
            f"The next one below is {below:g}."
        )
    if not _SMALLEST <= number <= _LARGEST:
        raise ValueError(f"`{name}` must lie between 2**-126 and 2**126; got {number:g}.")
    return number


def multiplied(tree: T, factor: Array) -> T:
    """Multiply the inexact leaves in at least float32.

    A 16-bit product could leave the range of its format, up or down, before anything looks at it.
    """

    def multiply(leaf: PyTree) -> PyTree:
        if not is_inexact(leaf):
            return leaf
        leaf = jnp.asarray(leaf)
        wide = at_least_float32(leaf.dtype)
        return leaf.astype(wide) * factor.astype(wide)

    return jtu.tree_map(multiply, tree)


class AbstractLossScaling(eqx.Module):
    """The base class of all loss scalings. An immutable pytree: `adjust` returns the next one.

    Attributes:
        loss_scaling: The scale, for logging.

    Example:
        ```python
        import halfstep

        for scaling in (halfstep.DynamicLossScaling(), halfstep.NoLossScaling()):
            assert isinstance(scaling, halfstep.AbstractLossScaling)
        assert halfstep.DynamicLossScaling().checks_finite
        assert not halfstep.NoLossScaling().checks_finite
        ```
    """

    loss_scaling: eqx.AbstractVar[Any]

    def __repr__(self) -> str:
        return with_values(self)

    @property
    @abc.abstractmethod
    def checks_finite(self) -> bool:
        """Whether a gradient transform checks finiteness for this scaling by default."""

    @abc.abstractmethod
    def scale(self, tree: T) -> T:
        """Multiply the inexact leaves by the scale, in float32 or wider."""

    @abc.abstractmethod
    def unscale(self, tree: T) -> T:
        """Divide the inexact leaves by the scale, in float32 or wider."""

    @abc.abstractmethod
    def adjust(self, grads_finite: Any) -> "AbstractLossScaling":
        """Return the scaling for the next step.

        Args:
            grads_finite: A boolean scalar or a `Verdict`.
        """


class DynamicLossScaling(AbstractLossScaling):
    """A loss scale that finds its own size.

    The scale is divided by `factor` after a step whose gradients were not finite, and multiplied by
    `factor` after exactly `period` good steps in a row, within a floor and a ceiling. It is a power
    of two at all times, so scaling and unscaling never round.

    Args:
        loss_scaling: The scale to begin with.
        min_loss_scaling: The floor.
        max_loss_scaling: The ceiling. The default, 2**24, lifts the smallest float16 to 1.
        period: Good steps in a row before the scale grows.
        factor: The factor by which the scale grows and shrinks, a power of two.

    Example:
        ```python
        import halfstep

        scaling = halfstep.DynamicLossScaling(loss_scaling=2**15, period=2)
        scaling = scaling.adjust(False)
        assert scaling.loss_scaling == 2**14
        scaling = scaling.adjust(True).adjust(True)
        assert scaling.loss_scaling == 2**15
        ```
    """

    loss_scaling: Float[Array, "..."]
    counter: Int[Array, "..."]
    min_loss_scaling: float = eqx.field(static=True)
    max_loss_scaling: float = eqx.field(static=True)
    period: int = eqx.field(static=True)
    factor: float = eqx.field(static=True)

    @checked
    def __init__(
        self,
        loss_scaling: Any = 2.0**15,
        min_loss_scaling: Any = 1.0,
        max_loss_scaling: Any = 2.0**24,
        *,
        period: int = 2000,
        factor: Any = 2,
    ):
        initial = power_of_two(loss_scaling, "loss_scaling")
        self.min_loss_scaling = power_of_two(min_loss_scaling, "min_loss_scaling")
        self.max_loss_scaling = power_of_two(max_loss_scaling, "max_loss_scaling")
        self.factor = power_of_two(factor, "factor")
        if not self.min_loss_scaling <= initial <= self.max_loss_scaling:
            raise ValueError(
                f"`loss_scaling` must lie between `min_loss_scaling`, {self.min_loss_scaling:g}, "
                f"and `max_loss_scaling`, {self.max_loss_scaling:g}; got {initial:g}."
            )
        if self.factor < 2:
            raise ValueError(f"`factor` must be 2 or a larger power of two; got {self.factor:g}.")
        if period != int(period) or period < 1:
            raise ValueError(
                f"`period` must be an integer number of steps, 1 or more; got {period}."
            )
        self.period = int(period)
        # Arrays, because they change from step to step inside a compiled function. Floor, ceiling,
        # period and factor are static: as arrays they would be state of a checkpoint that no step
        # changes, and a comparison with them could not be folded.
        self.loss_scaling = jnp.asarray(initial, jnp.float32)
        self.counter = jnp.asarray(0, jnp.int32)

    @property
    def checks_finite(self) -> bool:
        """Always true: without a verdict the scale cannot move."""
        return True

    def scale(self, tree: T) -> T:
        """Multiply the inexact leaves by the scale, in float32 or wider."""
        return multiplied(tree, self.loss_scaling)

    def unscale(self, tree: T) -> T:
        """Divide the inexact leaves by the scale, in float32 or wider."""
        # The reciprocal of a power of two is exact, so this is a division without its cost.
        return multiplied(tree, 1.0 / self.loss_scaling)

    def adjust(self, grads_finite: Any) -> "DynamicLossScaling":
        """Return the scaling for the next step, given whether this step's gradients were finite."""
        finite = as_predicate(grads_finite, "grads_finite")
        if finite is None:
            raise ValueError(
                "DynamicLossScaling needs to know whether the gradients are finite, but the "
                "verdict was not checked: pass check_finite=True to the gradient transform."
            )
        # Selects and not branches: two scalars are not worth a conditional in the program.
        good = jnp.where(finite, self.counter + 1, 0)
        grow = good == self.period
        grown = jnp.minimum(self.loss_scaling * self.factor, self.max_loss_scaling)
        shrunk = jnp.maximum(self.loss_scaling / self.factor, self.min_loss_scaling)
        kept = jnp.where(grow, grown, self.loss_scaling)
        return eqx.tree_at(
            lambda s: (s.loss_scaling, s.counter),
            self,
            (jnp.where(finite, kept, shrunk), jnp.where(grow, 0, good)),
        )


class StaticLossScaling(AbstractLossScaling):
    """A loss scale that never changes. Finiteness is checked, so that bad steps can be skipped.

    Args:
        loss_scaling: The scale, a power of two.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        scaling = halfstep.StaticLossScaling(2**10)
        assert scaling.scale(jnp.float16(3.0)) == 3072
        assert scaling.unscale(jnp.float16(3072.0)) == 3
        ```
    """

    loss_scaling: Float[Array, "..."]

    @checked
    def __init__(self, loss_scaling: Any):
        self.loss_scaling = jnp.asarray(power_of_two(loss_scaling, "loss_scaling"), jnp.float32)

    @property
    def checks_finite(self) -> bool:
        """Always true: a fixed scale can overflow."""
        return True

    def scale(self, tree: T) -> T:
        """Multiply the inexact leaves by the scale, in float32 or wider."""
        return multiplied(tree, self.loss_scaling)

    def unscale(self, tree: T) -> T:
        """Divide the inexact leaves by the scale, in float32 or wider."""
        return multiplied(tree, 1.0 / self.loss_scaling)

    def adjust(self, grads_finite: Any) -> "StaticLossScaling":
        """Return the scaling itself."""
        as_predicate(grads_finite, "grads_finite")
        return self


class NoLossScaling(AbstractLossScaling):
    """No loss scale, for bfloat16 and float32, whose range needs none.

    Nothing is computed: trees pass through, and no finite check is compiled unless a gradient
    transform is given `check_finite=True`.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        tree = {"w": jnp.ones(3)}
        assert halfstep.NoLossScaling().scale(tree) is tree
        ```
    """

    def __init__(self):
        pass

    @property
    def loss_scaling(self) -> np.ndarray:
        """One, for code that logs the scale of whatever scaling is in use."""
        return np.ones((), np.float32)

    @property
    def checks_finite(self) -> bool:
        """False: finiteness is only checked if asked for."""
        return False

    def scale(self, tree: T) -> T:
        """Return the tree itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Return the tree itself."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoLossScaling":
        """Return the scaling itself."""
        as_predicate(grads_finite, "grads_finite")
        return self
