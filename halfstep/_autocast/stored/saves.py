"""Say what is stored for the backward pass: by the user's rules and policies, or by default.

`Saves` holds all that was asked for, and answers for one operation at a time. `choice` knows what
depends on the function, such as whether it has layers in a loop. `regions` makes the rest again.
"""

import dataclasses
import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jax.extend.core import Primitive

from halfstep._autocast.stored.names import OFFLOADED, ON_DEVICE, Store
from halfstep._policy import Operation, StoreRule

_TO_HOST = f"{OFFLOADED}device/pinned_host"
RematPolicy = Callable[..., Any]
"""A policy of `jax.checkpoint`: says whether the results of a primitive are saved."""


class Again(enum.Enum):
    """Which values autocast makes again for the backward pass, where no rule says otherwise."""

    NOTHING = "JAX stores what it needs, or a `jax.checkpoint` of the user's says what"
    WIDE = "float32 between products, and results that are cheaper to make than to store"
    MOST = "everything but the results of products"
    TWICE = "in a function that the user recomputes, what is not worth writing to memory"


@dataclasses.dataclass(frozen=True)
class Saves:
    """The values of a function that are stored for its backward pass, and their form."""

    policies: tuple[RematPolicy, ...] = ()
    """The policies of the `jax.checkpoint`s around the function, the outermost first."""
    code: str | None = None
    """The code of stored values that no rule matches."""
    rules: tuple[StoreRule, ...] = ()
    """The user's rules, which come before policies and defaults."""
    again: Again = Again.WIDE
    barred: bool = True
    """As `Store.barred`; false in a loop, whose backward pass is another loop."""

    @property
    def is_own(self) -> bool:
        """Whether autocast decides, and not a `jax.checkpoint` of the user's."""
        return self.again in (Again.WIDE, Again.MOST)

    @property
    def by_graph(self) -> bool:
        """Whether the function decides if `WIDE` or `MOST` is made again.

        Everything that lies between values in fewer bits is made again from these. And a rule for
        every operation leaves nothing to decide.
        """
        every = any(rule.is_for_all and rule.outcome == "recompute" for rule in self.rules)
        plain = all(rule.outcome in ("keep", "recompute") for rule in self.rules)
        return self.is_own and self.code is None and plain and not every

    @property
    def names_values(self) -> bool:
        """Whether values are stored under names, which a `jax.checkpoint` saves."""
        return self.again is Again.MOST or bool(self.rules) or bool(self.policies)

    def within(self, policy: RematPolicy | None, *, barred: bool) -> "Saves":
        """Return the same for a function that is in another `jax.checkpoint` of the user's."""
        more = () if policy is None else (policy,)
        made = dataclasses.replace(
            self, policies=(*self.policies, *more), again=Again.NOTHING, barred=barred
        )
        # Without a policy or a rule, only the function's inputs are saved.
        return made if made.names_values else Saves(again=Again.NOTHING)

    def chosen(
        self,
        operation: Operation,
        lines: Sequence[str],
        *,
        dear: bool,
        numbered: Collection[StoreRule] = (),
    ) -> StoreRule | None:
        """Return the user's first rule that matches the results of an operation.

        Args:
            operation: The operation.
            lines: Where it is written, and the calls that led there.
            dear: Whether its results would be stored, or are expensive to recompute. A rule that
                names no operation matches only such results: everything that is computed in a
                scope, stored in 8 bits, would take more memory than its contractions in 16.
            numbered: The rules with a number that match this operation.
        """
        concerned = (
            rule
            for rule in self.rules
            if (dear or rule.op is not None) and (rule.number is None or rule in numbered)
        )
        return next((rule for rule in concerned if rule.matches(operation, lines)), None)

    def by_rule(self, rule: StoreRule) -> Store | None:
        """Return how results that a rule matches are kept; `None` if they are recomputed."""
        if rule.outcome == "recompute":
            return None
        if rule.outcome == "offload":
            return Store(None, _TO_HOST, self.barred)
        return Store(None if rule.outcome == "keep" else rule.outcome, barred=self.barred)

    def by_policy(
        self, primitive: Primitive, avals: Sequence[Any], params: Mapping[str, Any], *, dear: bool
    ) -> Store | None:
        """Return how the results of an operation that no rule matches are kept.

        Args:
            primitive: The operation.
            avals: The types of its operands.
            params: The parameters of the primitive.
            dear: Whether it is expensive to recompute: a contraction, a kernel, a communication.
        """
        if self.again is Again.MOST and dear:
            return Store(self.code, barred=self.barred)
        found = (self._store(policy(primitive, *avals, **params)) for policy in self.policies)
        return next((store for store in found if store is not None), None)

    def _store(self, verdict: Any) -> Store | None:
        # JAX's own verdicts have no public names: `Saveable`, `Recompute`, and `Offloadable`, which
        # says from where to where.
        if verdict is False or type(verdict).__name__ == "RecomputeType":
            return None
        is_moved = hasattr(verdict, "dst")
        name = f"{OFFLOADED}{verdict.src}/{verdict.dst}" if is_moved else ON_DEVICE
        return Store(self.code, name, self.barred)
