"""Find rules that tell the stored values of a program apart.

A plan is a policy. A policy names values by operation, scope and line, and by a number among all
values that match these. Values that no such rule tells apart, such as those of a function that is
called twice, are one group: they are stored alike.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence

from halfstep._autocast import RuleMatches
from halfstep._policy import StoreOutcome, StoreRule
from halfstep._preflight.planning.candidates import Place
from halfstep._program import Finder


@dataclasses.dataclass(frozen=True)
class Group:
    """Operations whose results one rule names.

    Attributes:
        places: Their positions on the tape.
        rule: The rule, with any outcome.
    """

    places: frozenset[int]
    rule: StoreRule

    def with_outcome(self, outcome: StoreOutcome) -> StoreRule:
        """Return the rule with an outcome."""
        return dataclasses.replace(self.rule, outcome=outcome)


@dataclasses.dataclass(frozen=True)
class Family:
    """Groups whose rules differ only in their numbers, such as one product of every layer.

    Attributes:
        groups: Their numbers.
        rule: The rule without a number, with any outcome.
        is_whole: Whether the rule matches the operations of these groups and no others.
    """

    groups: tuple[int, ...]
    rule: StoreRule
    is_whole: bool


class Addresses:
    """The operations of a program that rules match.

    Attributes:
        groups: The operations that may be stored, as finely as rules can tell them apart.
        families: Groups whose rules differ only in their numbers; other groups are alone.
    """

    def __init__(self, places: Sequence[Place]):
        """Group operations.

        Args:
            places: All operations: a rule that names an operation matches all with that name.
        """
        self.places = places
        finder = Finder()
        plans = {id(place.plan): place.plan for place in places}
        self._matches = {key: RuleMatches(plan.graph, finder) for key, plan in plans.items()}
        self._positions: dict[StoreRule, Mapping[int, int]] = {}

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        merged: list[Group] = []
        for position, place in enumerate(self.places):
            if place.is_fixed or not (place.is_dear or place.is_anchor):
                continue
            group = self.group(frozenset({position}))
            # A rule that matches other operations as well joins all of them into one group.
            joined = [other for other in merged if not other.places.isdisjoint(group.places)]
            while joined:
                merged = [other for other in merged if other not in joined]
                group = self.group(group.places.union(*(other.places for other in joined)))
                joined = [other for other in merged if not other.places.isdisjoint(group.places)]
            merged.append(group)
        return tuple(sorted(merged, key=lambda group: min(group.places)))

    @functools.cached_property
    def families(self) -> tuple[Family, ...]:
        alike: dict[StoreRule, list[int]] = {}
        for number, group in enumerate(self.groups):
            alike.setdefault(dataclasses.replace(group.rule, number=None), []).append(number)
        made = []
        for rule, members in alike.items():
            own = frozenset().union(*(self.groups[number].places for number in members))
            made.append(Family(tuple(members), rule, self.concerned(rule) == own))
        return tuple(made)

    def group(self, members: frozenset[int]) -> Group:
        """Return the group of a rule that matches some operations and as few others as possible."""
        best: Group | None = None
        for rule in self._rules(members):
            found = self.concerned(rule)
            if best is None or len(found) < len(best.places):
                best = Group(found, rule)
            if len(found) == len(members):
                break
        # At least one rule matches all of them: the rule for every operation.
        return best or Group(members, StoreRule("keep", op="*"))

    def concerned(self, rule: StoreRule) -> frozenset[int]:
        """Return the operations that a rule decides about if it comes after the user's rules."""
        every = dataclasses.replace(rule, number=None)
        return frozenset(
            position
            for position, number in self._numbers(every).items()
            if rule.number is None or number == rule.number
        )

    def _numbers(self, rule: StoreRule) -> Mapping[int, int]:
        """Return the positions that a rule without a number matches, each with its number.

        Operations are numbered within their function. Those that are not on the tape are counted,
        too.
        """
        if rule not in self._positions:
            counted = {
                key: {index: number for number, index in enumerate(matches.without_number(rule))}
                for key, matches in self._matches.items()
            }
            self._positions[rule] = {
                position: counted[id(place.plan)][place.index]
                for position, place in enumerate(self.places)
                if place.index in counted[id(place.plan)]
                and (place.is_dear or rule.op is not None)
                and not place.is_fixed
            }
        return self._positions[rule]

    def _rules(self, members: frozenset[int]) -> Iterator[StoreRule]:
        """Yield rules that match all of some operations, the simplest first."""
        places = [self.places[position] for position in sorted(members)]
        names = {place.operation.primitive for place in places}
        op = next(iter(names)) if len(names) == 1 else None
        all_dear = all(place.is_dear for place in places)
        if op is None and not all_dear:
            op = "*"
        ops = (None, op) if all_dear else (op,)
        scopes = {place.operation.scope for place in places}
        scope = next(iter(scopes)) if len(scopes) == 1 else ""
        if not scope or re.search(r"[,=@:#*?\[\]]", scope):
            # The operations have no common scope, or a scope that a rule cannot name.
            scope = None
        common = set(places[0].lines).intersection(*(place.lines for place in places))
        # The innermost line comes first: the operation is written there.
        lines = [text for line in places[0].lines if line in common for text in _texts(line)]
        for with_line in (None, *lines):
            for with_scope in dict.fromkeys((scope, None) if with_line is None else (None, scope)):
                for with_op in dict.fromkeys(ops):
                    if (with_op, with_scope, with_line) != (None, None, None):
                        yield StoreRule("keep", op=with_op, scope=with_scope, line=with_line)
        if op is None:
            return
        # Rules with a number follow, those that match the fewest operations first: the operations
        # of one call in every layer, sooner than all operations of a function.
        unnumbered = [
            StoreRule("keep", op=op, scope=with_scope, line=with_line)
            for with_line in (*lines, None)
            for with_scope in dict.fromkeys((None, scope))
        ]
        for rule in sorted(unnumbered, key=lambda rule: len(self._numbers(rule))):
            numbers = {self._numbers(rule)[position] for position in members}
            if len(numbers) == 1:
                yield dataclasses.replace(rule, number=numbers.pop())


def _texts(line: str) -> tuple[str, ...]:
    """Return how a rule may write a line: with the file's name, or the known part of its path."""
    return tuple(dict.fromkeys((os.path.basename(line), line)))
