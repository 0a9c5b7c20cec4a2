"""The products of a plan that have a place in a recipe's state: their names, and what they get."""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from halfstep._autocast.f8.product import Off, Site, Slot, Slots
from halfstep._autocast.types import Plan, inner_plans
from halfstep._policy import plain_scope
from halfstep._program import Cond, Scan


class Named(NamedTuple):
    """A product of a plan, or as many as its loops have turns."""

    name: str
    site: Site
    turns: tuple[int, ...]
    """Of the loops that it is in, the outermost first."""


def named_sites(plan: Plan) -> list[Named]:
    """All products that a recipe's state is for, in the order in which they are written."""
    numbers: collections.Counter[str] = collections.Counter()
    found = []
    for base, site, turns in _sites(plan, ()):
        number = numbers[base]
        numbers[base] += 1
        found.append(Named(f"{base}.{number}", site, turns))
    return found


def _sites(plan: Plan, turns: tuple[int, ...]) -> Iterator[tuple[str, Site, tuple[int, ...]]]:
    for node, decision in zip(plan.graph.nodes, plan.decisions, strict=True):
        if decision.site is not None and plan.settings.has_state:
            scope = plain_scope(node.scope)
            yield f"{scope}/{node.name}" if scope else node.name, decision.site, turns
        structure = node.structure
        more = (structure.length,) if isinstance(structure, Scan) else ()
        for inner in inner_plans(decision.inner):
            yield from _sites(inner, (*turns, *more))


def check_sites(have: Sequence[str], want: Sequence[str]) -> None:
    """Raise unless state is that of a function's products.

    Args:
        have: The names that there is state for.
        want: Those of the function's products.
    """
    if sorted(have) == sorted(want):
        return
    missing = [name for name in want if name not in have]
    # JAX sorts the names of a dictionary wherever it rebuilds one.
    unknown = sorted(set(have) - set(want))
    parts = [
        f"{what} {', '.join(map(repr, names))}"
        for what, names in (("no state for", missing), ("and state for", unknown))
        if names
    ]
    raise ValueError(
        "the recipe's state is that of other products than the function has: "
        f"{' '.join(parts).removeprefix('and ')}. Make it anew with recipe.init(loss, ...), or "
        "restore the state that belongs to this function."
    )


def placed(plan: Plan, state: Mapping[str, Slot | Off]) -> Slots:
    """What each product gets, where it is."""
    names = [found.name for found in named_sites(plan)]
    check_sites(list(state), names)
    return _placed(plan, iter([state[name] for name in names])) or {}


def _placed(plan: Plan, slots: Iterator[Slot | Off]) -> Slots | None:
    made: dict[int, Any] = {}
    for index, (node, decision) in enumerate(zip(plan.graph.nodes, plan.decisions, strict=True)):
        if decision.site is not None and plan.settings.has_state:
            made[index] = next(slots)
        inside = [_placed(inner, slots) for inner in inner_plans(decision.inner)]
        if any(found is not None for found in inside):
            made[index] = tuple(inside) if isinstance(node.structure, Cond) else inside[0]
    return made or None
