"""Find what layers that are written out repeat, so that it is differentiated once.

JAX differentiates a program operation by operation, which takes most of the time of tracing a
gradient. Operations that several layers repeat become one function that the layers share. `replay`
differentiates this function once.
"""

import collections
import dataclasses
from collections.abc import Hashable, Sequence

from halfstep._autocast.again.regions import Region
from halfstep._autocast.again.signatures import Signatures, shared_scopes
from halfstep._autocast.plans import Plan
from halfstep._program import Constant, CustomJvp

# A function that is shared is traced and differentiated once more than operations that run by
# themselves, which pays off from the second or third occurrence on, and not for single operations.
_FEWEST_OCCURRENCES = 3
_FEWEST_UNITS = 2

Unit = int | Region


@dataclasses.dataclass(frozen=True)
class Repeat:
    """Operations and regions that run one after the other, and occur several times."""

    units: tuple[Unit, ...]
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    """The values that come in."""
    values: tuple[int, ...]
    """All values, by their place in the function: those that come in, and those that are made."""
    wanted: frozenset[int]
    """The places of values that are read or returned outside."""
    entered: int
    """The number of scopes that all operations share."""
    signature: Hashable


def with_repeats(
    plan: Plan, units: Sequence[Unit], signatures: Signatures, *, regions_alone: bool = False
) -> list[Unit | Repeat]:
    """Return a schedule in which the units that layers repeat are gathered.

    Args:
        plan: The plan.
        units: Its schedule.
        signatures: The signatures of its operations.
        regions_alone: Whether a region that stays without other units is a repeat, too.
    """
    runs = _runs(plan, units, signatures, regions_alone)
    found = {start: _repeat(plan, units[start:end], signatures) for start, end in runs}
    counts = collections.Counter(repeat.signature for repeat in found.values())
    made: list[Unit | Repeat] = []
    place = 0
    while place < len(units):
        repeat = found.get(place)
        if repeat is not None and counts[repeat.signature] >= _FEWEST_OCCURRENCES:
            made.append(repeat)
            place += len(repeat.units)
        else:
            made.append(units[place])
            place += 1
    return made


def _runs(
    plan: Plan, units: Sequence[Unit], signatures: Signatures, regions_alone: bool
) -> list[tuple[int, int]]:
    """Return the beginnings and ends of units that always occur together, in the same order."""
    if not units:
        return []
    symbols = [_symbol(plan, unit, signatures) for unit in units]
    links = [
        (symbols[place], symbols[place + 1], _scopes_between(plan, *units[place : place + 2]))
        for place in range(len(units) - 1)
    ]
    often, together = collections.Counter(symbols), collections.Counter(links)
    # Two units belong together if neither ever occurs without the other. The last unit of a layer
    # and the first unit of the next one do not: they meet once less often than there are layers.
    starts = [0]
    for place, link in enumerate(links):
        if not together[link] == often[link[0]] == often[link[1]]:
            starts.append(place + 1)
    return [
        (start, end)
        for start, end in zip(starts, [*starts[1:], len(units)], strict=True)
        if often[symbols[start]] >= _FEWEST_OCCURRENCES
        and (end - start >= _FEWEST_UNITS or (regions_alone and isinstance(units[start], Region)))
    ]


def _symbol(plan: Plan, unit: Unit, signatures: Signatures) -> Hashable:
    if isinstance(unit, Region):
        return "region", unit.is_last, signatures.region(unit)
    node, decision = plan.graph.nodes[unit], plan.decisions[unit]
    # Effects have to stay where they are, and loops have their own functions.
    is_plain = decision.inner is None or isinstance(node.structure, CustomJvp)
    is_shared = is_plain and not node.effects and decision.store is None
    return signatures.operation(unit) if is_shared else ("only once", unit)


def _scopes_between(plan: Plan, before: Unit, after: Unit) -> Hashable:
    """Return the scopes that are left and entered between two units."""
    pair = [
        unit.nodes[edge] if isinstance(unit, Region) else unit
        for unit, edge in ((before, -1), (after, 0))
    ]
    shared = shared_scopes(plan, pair)
    return tuple(plan.graph.nodes[index].source.name_stack[shared:] for index in pair)


def _repeat(plan: Plan, units: Sequence[Unit], signatures: Signatures) -> Repeat:
    graph = plan.graph
    nodes = tuple(
        index for unit in units for index in (unit.nodes if isinstance(unit, Region) else (unit,))
    )
    made = {number for index in nodes for number in graph.nodes[index].outs}
    read = (operand for index in nodes for operand in graph.nodes[index].ins)
    inputs = dict.fromkeys(
        operand for operand in read if not isinstance(operand, Constant) and operand not in made
    )
    numbers = {number: place for place, number in enumerate(inputs)}
    entered, inside = shared_scopes(plan, nodes), set(nodes)
    parts = signatures.function(nodes, numbers, entered)
    values = tuple(numbers)
    wanted = frozenset(
        place
        for place, number in enumerate(values)
        if number in graph.returned or not graph.users[number] <= inside
    )
    shape = tuple(
        (unit.is_last, signatures.region(unit)) if isinstance(unit, Region) else None
        for unit in units
    )
    return Repeat(
        tuple(units), nodes, tuple(inputs), values, wanted, entered, (parts, shape, wanted)
    )
