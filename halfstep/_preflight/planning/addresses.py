"""Find rules that tell the stored values of a program apart.

A plan is a policy, and a policy names values by operation, scope and line. Values that no such rule
tells apart, such as those of layers that a Python loop writes out, are one group: they are stored
alike.
"""

import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from halfstep._base import compile_rule
from halfstep._policy import StoreOutcome, StoreRule
from halfstep._preflight.planning.candidates import Place


@dataclasses.dataclass(frozen=True)
class Group:
    """Operations whose results one rule names.

    Attributes:
        places: Their positions on the tape.
        op: The rule's operation, if it names one.
        scope: The rule's scope, if it names one.
        line: The rule's line, if it names one.
    """

    places: frozenset[int]
    op: str | None
    scope: str | None
    line: str | None

    def rule(self, outcome: StoreOutcome) -> StoreRule:
        """The rule with an outcome."""
        return StoreRule(outcome, op=self.op, scope=self.scope, line=self.line)


def groups(places: Sequence[Place]) -> list[Group]:
    """Group the operations that may be stored, as finely as rules can tell them apart.

    Args:
        places: All operations: a rule that names an operation is for all that have its name.
    """
    index = _Index(places)
    alike: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for position, place in enumerate(places):
        if (place.is_dear or place.is_anchor) and not place.is_fixed:
            operation = place.operation
            alike[operation.primitive, operation.scope, place.lines].add(position)
    found = [_group(frozenset(members), index) for members in alike.values()]
    # A rule that is for more than its own operations joins them with those others.
    merged: list[Group] = []
    for group in found:
        apart = [other for other in merged if other.places.isdisjoint(group.places)]
        joined = [other for other in merged if not other.places.isdisjoint(group.places)]
        while joined:
            group = _group(group.places.union(*(other.places for other in joined)), index)
            joined = [other for other in apart if not other.places.isdisjoint(group.places)]
            apart = [other for other in apart if other.places.isdisjoint(group.places)]
        merged = [*apart, group]
    return sorted(merged, key=lambda group: min(group.places))


class _Index:
    """Operations by what rules name."""

    def __init__(self, places: Sequence[Place]):
        self.places = places
        self.free = {i for i, place in enumerate(places) if not place.is_fixed}
        self.dear = {i for i in self.free if places[i].is_dear}
        self.ops: Mapping[str, set[int]] = defaultdict(set)
        self.scopes: Mapping[str, set[int]] = defaultdict(set)
        self.lines: Mapping[str, set[int]] = defaultdict(set)
        for position, place in enumerate(places):
            self.ops[place.operation.primitive].add(position)
            self.scopes[place.operation.scope].add(position)
            for line in place.lines:
                for text in _texts(line):
                    self.lines[text].add(position)

    def matching(self, op: str | None, scope: str | None, line: str | None) -> set[int]:
        """What a rule is for that comes after the user's."""
        if op == "*":
            found = set(self.free)
        else:
            found = set(self.dear if op is None else self.ops[op] & self.free)
        if scope is not None:
            rule = compile_rule(scope)
            found &= {
                position
                for name, positions in self.scopes.items()
                if rule.match(f"{name}/")
                for position in positions
            }
        return found if line is None else found & self.lines[line]


def _texts(line: str) -> tuple[str, ...]:
    """How a rule may write a line: by the file's name, or by all of its path that is known."""
    return tuple(dict.fromkeys((os.path.basename(line), line)))


def _group(members: frozenset[int], index: _Index) -> Group:
    """The group of a rule that is for some operations, and for as few others as there can be."""
    best: Group | None = None
    for op, scope, line in _rules(members, index):
        found = index.matching(op, scope, line)
        if best is None or len(found) < len(best.places):
            best = Group(frozenset(found), op, scope, line)
        if len(found) == len(members):
            break
    # Some rule is for all of them: that for every operation.
    return best or Group(members, "*", None, None)


def _rules(
    members: frozenset[int], index: _Index
) -> Iterator[tuple[str | None, str | None, str | None]]:
    """What rules for all of some operations can name, the simplest first."""
    places = [index.places[position] for position in members]
    names = {place.operation.primitive for place in places}
    op = next(iter(names)) if len(names) == 1 else None
    if op is None and not all(place.is_dear for place in places):
        op = "*"
    ops = [op] if any(not place.is_dear for place in places) else [None, op]
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
                    yield with_op, with_scope, with_line
