"""Find the operations of a function that a rule for stored values matches."""

import dataclasses
import functools
from collections.abc import Sequence

from halfstep._autocast.decide import operation_of
from halfstep._policy import Operation, StoreRule
from halfstep._program import Finder, Graph, Node


class RuleMatches:
    """The operations of a function that rules match; each rule is looked up once.

    A rule with a number matches one of the operations that the rule without its number matches. So
    numbers count the operations of one function, in the order in which they are traced.
    """

    def __init__(self, graph: Graph, finder: Finder):
        self._graph, self._finder = graph, finder
        # Most rules of a plan differ only in their numbers.
        self._found: dict[StoreRule, tuple[int, ...]] = {}

    def without_number(self, rule: StoreRule) -> Sequence[int]:
        """Return the positions of all operations that a rule names, whatever its number is."""
        every = dataclasses.replace(rule, number=None)
        if every not in self._found:
            self._found[every] = tuple(
                index for index, place in enumerate(self._written) if every.matches(*place)
            )
        return self._found[every]

    def numbered(self, rules: Sequence[StoreRule]) -> dict[int, list[StoreRule]]:
        """Return the rules with a number that match each operation, by its position."""
        made: dict[int, list[StoreRule]] = {}
        for rule in rules:
            named = self.without_number(rule)
            if rule.number is not None and rule.number < len(named):
                made.setdefault(named[rule.number], []).append(rule)
        return made

    @functools.cached_property
    def _written(self) -> list[tuple[Operation, tuple[str, ...]]]:
        graph, finder = self._graph, self._finder
        return [(operation_of(node, graph), lines_of(node, finder)) for node in graph.nodes]


def lines_of(node: Node, finder: Finder) -> tuple[str, ...]:
    """Return where an operation is written, and the calls that led there, as `file:line`."""
    return tuple(f"{found.file}:{found.line}" for found in finder.calls(node.source.traceback))
