"""Find rules that tell the stored values of a program apart.

A plan is a policy, and a policy names values by operation, scope and line. Values that no such rule
tells apart, such as those of layers that a Python loop writes out, are one group: they are stored
alike.
"""

import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from halfstep._policy import StoreOutcome, StoreRule
from halfstep._preflight.planning.candidates import Place


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


def groups(places: Sequence[Place]) -> list[Group]:
    """Group the operations that may be stored, as finely as rules can tell them apart.

    Args:
        places: All operations: a rule that names an operation is for all that have its name.
    """
    alike: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for position, place in enumerate(places):
        if (place.is_dear or place.is_anchor) and not place.is_fixed:
            operation = place.operation
            alike[operation.primitive, operation.scope, place.lines].add(position)
    found = [_group(frozenset(members), places) for members in alike.values()]
    # A rule that is for more than its own operations joins them with those others.
    merged: list[Group] = []
    for group in found:
        apart = [other for other in merged if other.places.isdisjoint(group.places)]
        joined = [other for other in merged if not other.places.isdisjoint(group.places)]
        while joined:
            group = _group(group.places.union(*(other.places for other in joined)), places)
            joined = [other for other in apart if not other.places.isdisjoint(group.places)]
            apart = [other for other in apart if other.places.isdisjoint(group.places)]
        merged = [*apart, group]
    return sorted(merged, key=lambda group: min(group.places))


def _texts(line: str) -> tuple[str, ...]:
    """How a rule may write a line: by the file's name, or by all of its path that is known."""
    return tuple(dict.fromkeys((os.path.basename(line), line)))


def _group(members: frozenset[int], places: Sequence[Place]) -> Group:
    """The group of a rule that is for some operations, and for as few others as there can be."""
    best: Group | None = None
    for rule in _rules([places[position] for position in members]):
        found = frozenset(
            position for position, place in enumerate(places) if _concerns(rule, place)
        )
        if best is None or len(found) < len(best.places):
            best = Group(found, rule)
        if len(found) == len(members):
            break
    # Some rule is for all of them: the rule for every operation.
    return best or Group(members, StoreRule("keep", op="*"))


def _concerns(rule: StoreRule, place: Place) -> bool:
    """Whether a rule that comes after the user's decides about an operation."""
    is_named = place.is_dear or rule.op is not None
    return is_named and not place.is_fixed and rule.matches(place.operation, place.lines)


def _rules(places: Sequence[Place]) -> Iterator[StoreRule]:
    """Rules that are for all of some operations, the simplest first."""
    names = {place.operation.primitive for place in places}
    op = next(iter(names)) if len(names) == 1 else None
    all_dear = all(place.is_dear for place in places)
    if op is None and not all_dear:
        op = "*"
    ops = (None, op) if all_dear else (op,)
    scopes = {place.operation.scope for place in places}
    scope = next(iter(scopes)) if len(scopes) == 1 else ""
    if not scope or re.search(r"[,=@:*?\[\]]", scope):
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
