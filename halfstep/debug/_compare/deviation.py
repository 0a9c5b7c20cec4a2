"""How far a site, and the gradient of a parameter, is from itself in float32."""

import dataclasses
from typing import Any

from halfstep.debug._compare.distance import distance
from halfstep.debug._compare.errors import gain
from halfstep.debug._instrument.site import Site


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far a site is from itself in float32.

    Attributes:
        site: What and where it is.
        dtype: The dtype in which the policy holds it.
        error: The norm of the difference, relative to that in float32; infinite where elements are
            finite in one and not in the other.
        cosine: Between both.
        before: The largest error among the sites that it is made of; in a loop, in that `turn`.
        turns: Of a site in a loop, the error in each turn.
        turn: Of a site in a loop, in which of `turns` it adds the most error.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def f(x):
            return jnp.tanh(x + 1000.0 - 1000.0)


        report = halfstep.debug.compare(f, "bf16,op:*=compute", sites="ops")(jnp.full(4, 0.3))
        worst = report.worst[0]
        assert isinstance(worst, halfstep.debug.Deviation)
        assert (worst.site.op, worst.dtype) == ("sub", "bf16")
        assert worst.error > 0.5 and worst.before < 0.01
        ```
    """

    site: Site
    dtype: str
    error: float
    cosine: float
    before: float
    turns: tuple[float, ...] = ()
    turn: int | None = None

    @property
    def there(self) -> float:
        """Its error where it adds the most: in that turn of a loop, or at all."""
        return self.error if self.turn is None else self.turns[self.turn]

    @property
    def added(self) -> float:
        """How much error this site adds to what it is made of; with 100 % all is lost."""
        return gain(self.there, self.before)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {**dataclasses.asdict(self), "site": self.site.to_dict(), "added": self.added}


@dataclasses.dataclass(frozen=True)
class GradientDeviation:
    """How far the gradient of a parameter is from that in float32.

    Attributes:
        path: Of the parameter.
        sums: What `error` and `cosine` are made of.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def loss(params, x):
            return x @ params["scale"] + params["offset"]


        params = {"scale": jnp.ones(4), "offset": jnp.float32(0)}
        report = halfstep.debug.compare(loss, "bf16")(params, jnp.full(4, 0.1))
        errors = {one.path: one.error for one in report.gradients}
        assert 0 < errors["scale"] < 0.01 and errors["offset"] == 0
        ```
    """

    path: str
    sums: tuple[float, ...] = dataclasses.field(repr=False)

    @property
    def error(self) -> float:
        """The norm of the difference, relative to that in float32."""
        return distance([self.sums]).error

    @property
    def cosine(self) -> float:
        """Between both."""
        return distance([self.sums]).cosine

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values."""
        return {"path": self.path, "error": self.error, "cosine": self.cosine}
