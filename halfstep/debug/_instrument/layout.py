"""Which row of a record belongs to which value of a program."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from halfstep.debug._instrument.body import Body, Select, site_of
from halfstep.debug._instrument.site import Site


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """The sites of a program, in the order of their rows, which is that of one run."""

    body: Body
    sites: tuple[Site, ...]
    owners: tuple[tuple[Body, int], ...]
    """Of each site, the function and the number of the value in it."""
    rows: Mapping[Body, Mapping[int, int]]
    """Of each function, the sites among its values."""
    loops: int
    """How deep loops are nested at most."""

    def __repr__(self) -> str:
        return f"<{len(self.sites)} sites>"

    def row(self, body: Body, number: int) -> int | None:
        """The row of a value, if it is recorded."""
        return self.rows[body].get(number)

    def count(self, body: Body) -> int:
        """How many rows a function and those in it have."""
        inside = sum(self.count(inner) for bodies in body.inner.values() for inner in bodies)
        return len(self.rows[body]) + inside


def layout_of(body: Body, select: Select, keep: Callable[[Site], bool] | None = None) -> Layout:
    """The rows of a program.

    Args:
        body: The outermost function.
        select: Which values are sites.
        keep: Which of these sites are.
    """
    sites: list[Site] = []
    owners: list[tuple[Body, int]] = []
    rows: dict[Body, Mapping[int, int]] = {}
    for owner in _bodies(body):
        rows[owner] = {}
    for owner, number in _in_order(body, {owner: select(owner) for owner in rows}):
        site = site_of(owner, number)
        if keep is None or keep(site):
            rows[owner] = {**rows[owner], number: len(sites)}
            sites.append(site)
            owners.append((owner, number))
    loops = max((len(owner.loops) for owner in rows), default=0)
    return Layout(body, tuple(sites), tuple(owners), MappingProxyType(rows), loops)


def _bodies(body: Body) -> Iterator[Body]:
    yield body
    for bodies in body.inner.values():
        for inner in bodies:
            yield from _bodies(inner)


def _in_order(body: Body, selected: Mapping[Body, frozenset[int]]) -> Iterator[tuple[Body, int]]:
    """Values in the order in which a run makes them."""
    for number in body.graph.inputs:
        if number in selected[body]:
            yield body, number
    for index, node in enumerate(body.graph.nodes):
        for inner in body.inner.get(index, ()):
            yield from _in_order(inner, selected)
        for number in node.outs:
            if number in selected[body]:
                yield body, number
