"""Select which values to store for the backward pass, and how: the fastest choice in a budget.

The backward pass needs some values of the forward pass. Each of them is stored in one of several
forms, or recomputed by the operation that made it. The operands of a recomputed operation must be
available as well: stored, given as arguments, or recomputed themselves. This is an integer program:

- `stored[g, f]` is one if the values of group `g` are stored in form `f`. The values of a group are
  those that one rule of a policy addresses.
- `again[o]` is one if operation `o` runs again.
- Every value that the backward pass needs, and every operand of an operation that runs again, is
  stored or recomputed.
- The bytes of all stored values, and the error that all forms add, are within their budgets.
- The time of all operations that run again, and of reading and writing the forms, is minimized.

With a price on bytes instead of a budget, the problem would be a minimum cut, which linear programs
solve without any branching. The budgets only cut off corners of that problem, so HiGHS, the solver
in SciPy, branches little: a body with hundreds of operations takes well under a second.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from halfstep._policy import StoreOutcome

# A selection within this share of the optimum is good enough: a compiler moves the peak by more.
GOOD_ENOUGH = 1e-3
_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to store a group of values.

    Attributes:
        name: The outcome of the rule that stores a value in this form.
        bytes: Bytes that it takes on the device.
        seconds: Time that writing and reading it takes, in addition to the value itself.
        error: The amount that it adds to the squared relative error of the gradient.
        host_bytes: Bytes that it takes on the host.
    """

    name: StoreOutcome
    bytes: int
    seconds: float = 0.0
    error: float = 0.0
    host_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Recomputation:
    """An operation that computes values from others, and may run again.

    Attributes:
        takes: Its operands, by number.
        makes: Its results, by number.
        seconds: Time that running it again takes.
        flops: FLOPs of its contractions.
        is_pure: Whether it may run again at all.
    """

    takes: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float
    flops: float = 0.0
    is_pure: bool = True


@dataclasses.dataclass(frozen=True)
class Problem:
    """The operations and forms to select from.

    Attributes:
        operations: The operations, in an order in which they can run.
        groups: The forms of each group.
        group_of: The group of each value, by number; `None` for a value that is not stored by
            itself: an argument, which is available anyway, or a value that is always recomputed.
        needed: The values that the backward pass reads.
        required: The groups that are stored in any case.
    """

    operations: tuple[Recomputation, ...]
    groups: tuple[tuple[Form, ...], ...]
    group_of: tuple[int | None, ...]
    needed: frozenset[int]
    required: frozenset[int] = frozenset()

    @functools.cached_property
    def maker(self) -> dict[int, int]:
        """The operation that makes each value; arguments are not in it."""
        return {
            value: index
            for index, operation in enumerate(self.operations)
            for value in operation.makes
        }


@dataclasses.dataclass(frozen=True)
class Selection:
    """The groups that are stored, and the operations that run again.

    Attributes:
        stored: The form of each group that is stored, by its number.
        again: The operations that run again.
        bytes: Bytes that all forms take on the device.
        host_bytes: Bytes that all forms take on the host.
        seconds: Time that the forms and the operations that run again take together.
        flops: FLOPs of the contractions that run again.
        error: The squared relative error that all forms add.
        gap: How far this selection may be from the best one, as a share of its time.
    """

    stored: dict[int, Form]
    again: frozenset[int]
    bytes: int
    host_bytes: int
    seconds: float
    flops: float
    error: float
    gap: float = 0.0


def select(
    problem: Problem,
    *,
    memory: float = np.inf,
    error: float = np.inf,
    time: float = np.inf,
    smallest: bool = False,
    gap: float = GOOD_ENOUGH,
) -> Selection | None:
    """Select the fastest forms within budgets.

    Args:
        problem: The operations and forms to select from.
        memory: The most bytes that may be stored on the device.
        error: The most that forms may add to the squared relative error.
        time: The most seconds that the selection may take.
        smallest: Whether to select the fewest bytes instead, and the fastest among equals.
        gap: How far the answer may be from the optimum, as a share of it.

    Returns:
        The selection; `None` if no selection is within these budgets.
    """
    # JAX requires SciPy, and imports little of it.
    from scipy.optimize import Bounds, milp

    forms = [(group, form) for group, forms in enumerate(problem.groups) for form in forms]
    columns = len(forms) + len(problem.operations)
    place = {(group, form.name): number for number, (group, form) in enumerate(forms)}
    seconds = np.array(
        [form.seconds for _, form in forms] + [op.seconds for op in problem.operations]
    )
    rows = _Rows(columns)
    for required, needing in _demands(problem):
        rows.at_least(_providers(problem, place, len(forms), required), needing, len(forms))
    for group, choices in enumerate(problem.groups):
        least = 1.0 if group in problem.required else 0.0
        rows.between([(place[group, form.name], 1.0) for form in choices], least, 1.0)
    for amount, limit in (
        ([form.bytes for _, form in forms], memory),
        ([form.error for _, form in forms], error),
        (seconds.tolist(), time),
    ):
        # Amounts become shares of their sum: HiGHS lets a row be off by an absolute tolerance.
        unit = sum(amount)
        if limit < unit:
            terms = [(i, value / unit) for i, value in enumerate(amount) if value]
            rows.between(terms, -np.inf, max(limit, 0.0) / unit)
    # SciPy infers the types of limits from their defaults, which are numbers.
    upper: Any = np.ones(columns)
    lower: Any = np.zeros(columns)
    for number, operation in enumerate(problem.operations):
        if not operation.is_pure:
            upper[len(forms) + number] = 0
    sizes = np.array([form.bytes for _, form in forms] + [0] * len(problem.operations), float)
    # Among choices that take the same time, prefer the smaller one, and the other way round.
    first, second = (sizes, seconds) if smallest else (seconds, sizes)
    objective = first / max(float(np.max(first, initial=0.0)), 1e-30)
    objective += 1e-6 * second / max(float(np.sum(second)), 1e-30)
    found = milp(
        objective,
        constraints=rows.constraint(),
        integrality=np.ones(columns),
        bounds=Bounds(lower, upper),
        options={"mip_rel_gap": gap, "time_limit": _SECONDS},
    )
    if found.x is None:
        return None
    chosen = found.x > 0.5
    return selection(
        problem,
        {group: form for (group, form), is_on in zip(forms, chosen, strict=False) if is_on},
        gap=float(found.mip_gap or 0.0),
    )


def selection(problem: Problem, stored: dict[int, Form], *, gap: float = 0.0) -> Selection:
    """Work out which operations run again if some groups are stored, and what all of it costs.

    Raises:
        ValueError: If a needed value is not stored and cannot be recomputed.
    """
    maker = problem.maker
    again: set[int] = set()
    waiting = list(problem.needed)
    while waiting:
        value = waiting.pop()
        group = problem.group_of[value]
        index = maker.get(value)
        if index is None or index in again or (group is not None and group in stored):
            continue
        operation = problem.operations[index]
        if not operation.is_pure:
            raise ValueError(f"value {value} is neither stored nor can be made again; got {stored}")
        again.add(index)
        waiting += operation.takes
    forms = stored.values()
    runs = [problem.operations[index] for index in again]
    return Selection(
        stored,
        frozenset(again),
        sum(form.bytes for form in forms),
        sum(form.host_bytes for form in forms),
        sum(form.seconds for form in forms) + sum(operation.seconds for operation in runs),
        sum(operation.flops for operation in runs),
        sum(form.error for form in forms),
        gap,
    )


def _demands(problem: Problem) -> Iterable[tuple[int, int | None]]:
    """Yield the values that must be available, each with the operation that needs it.

    `None` stands for the backward pass.
    """
    for value in sorted(problem.needed):
        yield value, None
    for index, operation in enumerate(problem.operations):
        for value in dict.fromkeys(operation.takes):
            yield value, index


def _providers(
    problem: Problem, place: dict[tuple[int, str], int], offset: int, value: int
) -> list[int] | None:
    """Return the variables that provide a value if one of them is 1; `None` for an argument."""
    index = problem.maker.get(value)
    if index is None:
        return None
    group = problem.group_of[value]
    forms: Sequence[Form] = () if group is None else problem.groups[group]
    return [*(place[group, form.name] for form in forms if group is not None), offset + index]


class _Rows:
    """Collects linear constraints."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.entries: list[tuple[int, int, float]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def at_least(self, providers: list[int] | None, needing: int | None, offset: int) -> None:
        """Require one of the providers to be 1 if the operation that needs them runs again."""
        if providers is None:
            return
        terms = [(column, 1.0) for column in providers]
        if needing is not None:
            terms.append((offset + needing, -1.0))
        self._add(terms, 1.0 if needing is None else 0.0, np.inf)

    def between(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        """Require a sum to be within limits."""
        if terms:
            self._add(terms, lower, upper)

    def _add(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        row = len(self.lower)
        self.entries += [(row, column, value) for column, value in terms]
        self.lower.append(lower)
        self.upper.append(upper)

    def constraint(self) -> list[Any]:
        """Return all rows as one constraint."""
        from scipy.optimize import LinearConstraint
        from scipy.sparse import coo_array

        if not self.lower:
            return []
        rows, columns, values = zip(*self.entries, strict=True)
        matrix = coo_array((values, (rows, columns)), (len(self.lower), self.columns))
        lower: Any = self.lower
        upper: Any = self.upper
        return [LinearConstraint(matrix.tocsr(), lower, upper)]
