"""Run a program to find where non-finite values began: once for flags, once for numbers."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from halfstep._program import Constant
from halfstep.debug._instrument.ancestors import ANY, Parents
from halfstep.debug._instrument.body import Body, Select
from halfstep.debug._instrument.flags import Flags, flag
from halfstep.debug._instrument.layout import InstrumentedCall, Layout, Value, layout_of
from halfstep.debug._instrument.run import run, run_for_rows
from halfstep.debug._instrument.stats import EMPTY, Column, Counted, Measure, Numbers
from halfstep.debug._nonfinite.cut import cut, region
from halfstep.debug._nonfinite.origin import ORDER, NonFiniteOrigin, Search, origin, turns_of

# LLVM takes most of the time of a compilation on a CPU, and a program that runs once does not
# repay it. XLA's own passes, which decide what is computed, stay as they are.
_RUNS_ONCE = MappingProxyType({"xla_backend_optimization_level": 0})
_OVER_DEVICES = frozenset(
    {"shard_map", "sharding_constraint", "reshard", "mesh_cast", "jit", "pjit"}
)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """The rows of some values of a program, and where non-finite values began."""

    layout: Layout
    rows: np.ndarray
    found: NonFiniteOrigin


def search(traced: InstrumentedCall) -> Recorded | None:
    """Find where non-finite values began, or return `None` if all values are finite.

    The first run flags the values that `cut` selects. The second run records all numbers, but only
    of the values among which the first non-finite one is, and it computes nothing else.
    """
    if _has_effects(traced.layout.body):
        return _by_all_numbers(traced)
    body = traced.layout.body
    selected = {owner: cut(owner) for owner in traced.layout.rows}
    coarse = layout_of(body, selected.__getitem__)
    flags = _run(traced, coarse, Flags(packed=not _is_over_devices(traced)), effects=True)
    started = Search(coarse, flags)
    found = started.find()
    if found is None:
        return None
    merged = Recorded(coarse, flags, found)
    chosen = _candidates(traced.layout, started, found, selected)
    # A report names the first NaN, but shows no numbers of it.
    for_nan = _inside(traced.layout, started, found.nan, selected)
    # The operands of a candidate may depend on the iteration, which only the second run tells
    # exactly. Then a third run records them.
    for _ in range(2):
        chosen = frozenset({*chosen, *_shown(merged, traced.layout, chosen)})
        fine = layout_of(body, _select(chosen | for_nan))
        measure = _Some(chosen, Numbers(traced.compute, detail=True))
        numbers = _run(traced, fine, measure, effects=False)
        if not _agree(coarse, flags, fine, numbers):
            break
        again = _merged((coarse, flags), (fine, numbers))
        if again is None:
            break
        merged, best = again, [again.layout.owners[again.found.row]]
        if chosen.issuperset([*best, *_shown(merged, traced.layout, best)]):
            return merged
    return _by_all_numbers(traced)


def _merged(*parts: tuple[Layout, np.ndarray]) -> Recorded | None:
    """Search among the rows of several runs; of a value in several, the last one counts."""
    layout = layout_of(parts[0][0].body, _select([o for part, _ in parts for o in part.owners]))
    rows = np.tile(np.asarray(EMPTY + (-1.0,) * layout.loops, np.float32), (len(layout.sites), 1))
    for part, given in parts:
        rows[[layout.rows[owner][number] for owner, number in part.owners]] = given
    found = origin(layout, rows)
    return None if found is None else Recorded(layout, rows, found)


def _select(values: Iterable[Value]) -> Select:
    found: dict[Body, set[int]] = {}
    for owner, number in values:
        found.setdefault(owner, set()).add(number)
    return lambda owner: frozenset(found.get(owner, ()))


def _shown(recorded: Recorded, layout: Layout, values: Iterable[Value]) -> Iterator[Value]:
    """Yield the operands of some values, whose numbers a report shows."""
    turns = tuple(map(float, turns_of(recorded.layout, recorded.rows, recorded.found.row)))
    around, _ = recorded.layout.owners[recorded.found.row]
    parents = Parents(layout)
    for owner, number in values:
        # Iterations are known for the loops around the first non-finite value only.
        at = turns if owner.loops == around.loops else (ANY,) * len(owner.loops)
        for row in parents.operands(layout.rows[owner][number], at):
            if not isinstance(row, Constant):
                yield layout.owners[row]


def _by_all_numbers(traced: InstrumentedCall) -> Recorded | None:
    """Record all numbers of all values in a single run."""
    layout, measure = traced.layout, Numbers(traced.compute, detail=True)
    rows = _compiled(lambda *arrays: run(layout, layout.body, arrays, measure)[1], traced)
    found = origin(layout, rows)
    return None if found is None else Recorded(layout, rows, found)


def _run(
    traced: InstrumentedCall, layout: Layout, measure: Measure, *, effects: bool
) -> np.ndarray:
    def rows_of(*arrays: Any) -> jax.Array:
        return run_for_rows(layout, arrays, measure, effects=effects)

    return _compiled(rows_of, traced)


def _compiled(func: Callable[..., jax.Array], traced: InstrumentedCall) -> np.ndarray:
    platforms = {device.platform for device in _devices(traced)} or {jax.default_backend()}
    options = dict(_RUNS_ONCE) if platforms == {"cpu"} else None
    return np.asarray(jax.jit(func, compiler_options=options)(*traced.call.arrays))


@dataclasses.dataclass(frozen=True)
class _Some(Measure):
    """All numbers of some values, and flags of the others."""

    values: frozenset[Value]
    numbers: Numbers

    def of(self, value: jax.Array, place: Value) -> Counted:
        return self.numbers.of(value, place) if place in self.values else flag(value)

    def rows(self, measured: Sequence[Any], loops: int) -> jax.Array:
        return self.numbers.rows(measured, loops)


def _candidates(
    layout: Layout, started: Search, found: NonFiniteOrigin, selected: Mapping[Body, frozenset[int]]
) -> frozenset[Value]:
    """Return the values among which the first non-finite value is.

    Args:
        layout: The layout with all values.
        started: The search among the selected values.
        found: The result of that search.
        selected: The values that `cut` selects, by function.
    """

    def time(value: Value) -> tuple[int, int]:
        row = layout.rows[value[0]][value[1]]
        return ORDER[layout.sites[row].stage], row

    candidates = _inside(layout, started, found.row, selected)
    before = time(started.layout.owners[found.row])
    # Another fault may have begun in a region that the first one passes through later, but only a
    # value that is computed before the first one can matter.
    others = {v for row in started.reached for v in _inside(layout, started, row, selected)}
    return candidates | {value for value in others if time(value) < before}


def _inside(
    layout: Layout, started: Search, row: int | None, selected: Mapping[Body, frozenset[int]]
) -> frozenset[Value]:
    """Return a selected value and the values of its region."""
    if row is None:
        return frozenset()
    owner, number = started.layout.owners[row]
    values = {number, *region(owner, number, selected[owner])}
    return frozenset((owner, value) for value in values if value in layout.rows[owner])


def _agree(coarse: Layout, flags: np.ndarray, fine: Layout, numbers: np.ndarray) -> bool:
    """Return whether both runs found the same values non-finite.

    They are different programs, and XLA may round differently in them. A value at the very limit
    of its dtype may overflow in one of them only.
    """
    places = {value: row for row, value in enumerate(coarse.owners)}
    return all(
        (flags[places[value], Column.BAD] > 0) == (numbers[row, Column.BAD] > 0)
        for row, value in enumerate(fine.owners)
        if value in places
    )


def _has_effects(body: Body) -> bool:
    """Return whether a second run of the program could differ from the first, or be noticed."""
    # Operations without results, such as prints, are left out of the second run.
    return any(node.effects and node.outs for node in body.graph.nodes)


def _is_over_devices(traced: InstrumentedCall) -> bool:
    # A call that is not inlined has shardings.
    names = {node.name for body in traced.layout.rows for node in body.graph.nodes}
    return len(_devices(traced)) > 1 or not names.isdisjoint(_OVER_DEVICES)


def _devices(traced: InstrumentedCall) -> set[Any]:
    arrays = [array for array in traced.call.arrays if isinstance(array, jax.Array)]
    return {device for array in arrays for device in array.sharding.device_set}
