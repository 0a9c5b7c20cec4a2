"""Find rules that tell the stored values of a program apart.

A plan is a policy, and a policy names values by operation, scope and line, and by a number among
all for which these hold. Values that no such rule tells apart, such as those of a function that is
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
        """The rule with an outcome."""
        return dataclasses.replace(self.rule, outcome=outcome)


@dataclasses.dataclass(frozen=True)
class Family:
    """Groups whose rules differ in their numbers only, such as one product of every layer.

    Attributes:
        groups: Their numbers.
        rule: The rule without a number, with any outcome.
        is_whole: Whether that rule is for the operations of these groups and no others.
    """

    groups: tuple[int, ...]
    rule: StoreRule
    is_whole: bool


class Addresses:
    """What rules are for, among the operations of a program.

    Attributes:
        groups: The operations that may be stored, as finely as rules can tell them apart.
        families: Groups whose rules differ in their numbers only; others are alone.
    """

    def __init__(self, places: Sequence[Place]):
        """Group operations.

        Args:
            places: All of them: a rule that names an operation is for all that have its name.
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
            # A rule that is for more than its own operations joins them with those others.
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
        """The group of a rule that is for some operations, and for as few others as can be."""
        best: Group | None = None
        for rule in self._rules(members):
            found = self.concerned(rule)
            if best is None or len(found) < len(best.places):
                best = Group(found, rule)
            if len(found) == len(members):
                break
        # Some rule is for all of them: the rule for every operation.
        return best or Group(members, StoreRule("keep", op="*"))

    def concerned(self, rule: StoreRule) -> frozenset[int]:
        """The operations that a rule decides about, if it comes after the user's own."""
        every = dataclasses.replace(rule, number=None)
        return frozenset(
            position
            for position, number in self._numbers(every).items()
            if rule.number is None or number == rule.number
        )

    def _numbers(self, rule: StoreRule) -> Mapping[int, int]:
        """The positions that a rule without a number is for, each with its number in its function.

        Operations that are not on the tape are counted, too.
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
        """Rules that are for all of some operations, the simplest first."""
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
            # None, or one that a rule cannot name.
            scope = None
        common = set(places[0].lines).intersection(*(place.lines for place in places))
        # The innermost first: it is where the operation is written.
        lines = [text for line in places[0].lines if line in common for text in _texts(line)]
        for with_line in (None, *lines):
            for with_scope in dict.fromkeys((scope, None) if with_line is None else (None, scope)):
                for with_op in dict.fromkeys(ops):
                    if (with_op, with_scope, with_line) != (None, None, None):
                        yield StoreRule("keep", op=with_op, scope=with_scope, line=with_line)
        if op is None:
            return
        # By number, among as few as there can be: those of one call in every layer, sooner than all
        # of a function.
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
    """How a rule may write a line: by the file's name, or by all of its path that is known."""
    return tuple(dict.fromkeys((os.path.basename(line), line)))
