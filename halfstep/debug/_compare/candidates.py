"""What a policy's search can choose from: rules for scopes, and for operations in them."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from halfstep._autocast import Plan, Rule, decided
from halfstep._policy import Operation, Outcome, PrecisionRule
from halfstep._program import Finder


@dataclasses.dataclass(frozen=True)
class Lowered:
    """An operation that a policy runs in few bits."""

    name: str
    scope: str
    line: str
    in_recipe: bool

    @property
    def operation(self) -> Operation:
        """As rules see it."""
        return Operation(self.name, self.scope, {}, (), ())


def lowered(plan: Plan) -> list[Lowered]:
    """The operations that run in the compute dtype, but for those that only move values."""
    finder, found = Finder(), []
    for owner, index in decided(plan):
        node, decision = owner.graph.nodes[index], owner.decisions[index]
        low = decision.dtype == owner.settings.compute and decision.rule is not Rule.FOLLOW
        if decision.inner is None and (low or decision.site is not None):
            line = finder.find(node.source.traceback).short
            scope = "/".join(part for part in node.scope.split("/") if part)
            found.append(Lowered(node.name, scope, line, decision.site is not None))
    return found


def by_scope(operations: Sequence[Lowered], outcome: Outcome) -> tuple[PrecisionRule, ...]:
    """A rule for each scope, the innermost first, and for each operation that is in none."""
    scopes = {operation.scope for operation in operations if operation.scope}
    ordered = sorted(scopes, key=lambda scope: -scope.count("/"))
    outside = dict.fromkeys(operation.name for operation in operations if not operation.scope)
    if any(operation.in_recipe for operation in operations):
        # A recipe's products are single operations, and so are their rules.
        return by_operation(operations, outcome)
    rules = [PrecisionRule(outcome, scope=_pattern(scope)) for scope in ordered]
    return _different([*rules, *(PrecisionRule(outcome, op=_pattern(name)) for name in outside)])


def by_operation(operations: Sequence[Lowered], outcome: Outcome) -> tuple[PrecisionRule, ...]:
    """A rule for each operation in each scope."""
    pairs = dict.fromkeys((operation.scope, operation.name) for operation in operations)
    ordered = sorted(pairs, key=lambda pair: -len(pair[0].split("/")) if pair[0] else 0)
    return _different(
        PrecisionRule(outcome, op=_pattern(name), scope=_pattern(scope) if scope else None)
        for scope, name in ordered
    )


def inside(
    rules: Sequence[PrecisionRule], operations: Sequence[Lowered]
) -> tuple[PrecisionRule, ...]:
    """Rules for the single operations that other rules are for."""
    made: list[PrecisionRule] = []
    for rule in rules:
        concerned = [one for one in operations if rule.matches(one.operation)]
        made += [rule] if rule.op else by_operation(concerned, rule.outcome)  # pyright: ignore[reportArgumentType]
    return _different(made)


def lines(rule: PrecisionRule, operations: Sequence[Lowered]) -> tuple[str, ...]:
    """The lines of the user's code that a rule is for."""
    found = dict.fromkeys(one.line for one in operations if rule.matches(one.operation))
    return tuple(found)


def _pattern(name: str) -> str:
    # What separates the parts of a policy's text cannot be in a rule; any one character can.
    return re.sub(r"[,=@:\s]", "?", name)


def _different(
    rules: Iterator[PrecisionRule] | Sequence[PrecisionRule],
) -> tuple[PrecisionRule, ...]:
    return tuple(dict.fromkeys(rules))
