"""Define plans: a function, and how each of its operations runs. `planning` makes them."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue

from halfstep._autocast.f8.product import Off, RecipeProduct, Slot, Slots
from halfstep._autocast.kinds import Kind, constant_kind, is_subject
from halfstep._autocast.primitives import CONTRACTIONS, PASSING, Rule
from halfstep._autocast.state import NO_STATE, Carry, StatePath, paths_inside
from halfstep._autocast.stored.names import Store
from halfstep._autocast.stored.saves import Saves
from halfstep._base import Rounding
from halfstep._policy import (
    PrecisionFunction,
    PrecisionRule,
    Recipe,
    plain_scope,
    recipes_of,
)
from halfstep._program import Cond, Constant, Graph, Node, Operand, Scan, size

FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the user has asked for."""

    compute: np.dtype
    rounds: bool = True
    """Whether wide values are rounded for readers behind a contraction: not inside functions with
    derivative rules of their own."""
    rules: tuple[PrecisionRule, ...] = ()
    accumulate: bool = False
    """Whether all contractions hand on their results in float32."""
    reduce: np.dtype | None = None
    """The dtype of parameters' gradients from contractions, if it is not the compute dtype."""
    recipe: Recipe | None = None
    """How products of weights are computed in 8 or 4 bits, unless a rule says otherwise."""
    saves: Saves = dataclasses.field(default_factory=Saves)
    """The values that are stored for the backward pass; the others are made again."""
    has_state: bool = True
    """Whether a recipe's state reaches the products: not inside a `shard_map` or a `while`."""
    is_linear: bool = False
    """Whether a function must stay linear in some of its inputs, because JAX transposes it. Neither
    recipes nor stores are linear, so none apply."""

    @functools.cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        """All recipes that products may have: the policy's own, then those that rules give."""
        return recipes_of(self.recipe, self.rules) if not self.is_linear else ()


class Passed(NamedTuple):
    """A value that enters or leaves a function whose operations count as its caller's.

    Where a value is rounded must not depend on whether the user recomputes a part of the function.
    So a function in a `jax.checkpoint` is planned as if it were written out.
    """

    kind: Kind
    made: int
    """The depth of the operation that makes it: how many barriers come before it at most."""
    after: int
    """The depth of what reads it, as far as this value decides."""
    from_low: bool
    width: int
    bound: float
    is_rounded: bool
    is_too_large: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
    """How one operation runs."""

    rule: Rule
    dtype: np.dtype
    """The dtype in which it takes the operands whose precision autocast chooses."""
    outs: tuple[Kind, ...]
    barrier: bool
    """Whether it ends an island: it is expensive to recompute, or must not run twice."""
    known: bool = True
    inner: Any = None
    """The plans of the functions inside it, and what else running them takes."""
    by: str = ""
    """The user's rule that has decided, if one has."""
    function: PrecisionFunction | None = None
    """The function of a rule that makes the operands itself."""
    site: RecipeProduct | None = None
    """The product in 8 or 4 bits, if the contraction is one."""
    refusal: str = ""
    """Why the recipe does not apply to the contraction, if it does not."""
    recipe: Recipe | None = None
    """The recipe that was chosen for the contraction, whether or not it applies."""
    recipe_by: str = ""
    """The user's rule that has chosen the recipe, if one has."""
    store: Store | None = None
    """How its results are kept for the backward pass, if a `jax.checkpoint` is to save them."""
    stored_by: str = ""
    """The user's rule that has decided how its results are kept, if one has."""
    passed: tuple[Passed, ...] = ()
    """What the plan inside knows of its operands, where its operations count as written out."""
    carries: tuple[Carry, ...] = ()
    """How a loop's carries are read."""


class Around(NamedTuple):
    """The surroundings of an operation, for planning the functions inside it."""

    carries: tuple[Carry, ...] = ()
    """How a loop's carries are read."""
    path: StatePath = NO_STATE
    """Where the state of a loop around the operation enters and leaves it."""
    entering: tuple[Passed, ...] = ()
    """Its operands as the caller knows them, if its operations count as written out."""

    def paths(self, node: Node) -> list[StatePath]:
        """Return where state enters and leaves each function inside the operation."""
        return [path for path, _ in paths_inside(node, self.carries, self.path)]


class Draft:
    """A plan that is being made: what is known about each value so far, by its number."""

    def __init__(self, graph: Graph, settings: Settings):
        self.graph, self.settings = graph, settings
        count = len(graph.avals)
        self.kinds: list[Kind] = [Kind.OTHER] * count
        self.after: list[int] = [0] * count
        """The largest number of barriers that lie before each value."""
        self.made: list[int] = [0] * count
        """The depth of the operation that makes each value."""
        self.passed: list[int] = [0] * count
        """The largest number of barriers before each value, where calls are barriers, too."""
        self.from_low: list[bool] = [False] * count
        """Whether each value is made of anything in the compute dtype."""
        self.width: list[int] = [size(aval) for aval in graph.avals]
        """The size of the largest value that each value is made of since the last barrier."""
        self.bounds: list[float] = [math.inf] * count
        """The largest magnitude that each value can have."""
        self.levels: list[int] = []
        self.depths: list[int] = []
        self.rounded: set[int] = set()
        self.too_large: set[int] = set()
        self.weights: list[bool] = [False] * count
        """Whether each value is made of parameters and constants alone, without a product."""
        self.reads: dict[int, dict[int, Kind]] = {}
        """The kinds in which operations read values, where it is not for their depth to say."""

    def enter(self, number: int, value: Passed) -> None:
        """Say what is known of a value that another plan has made."""
        self.kinds[number], self.made[number], self.after[number] = value[:3]
        self.from_low[number], self.width[number], self.bounds[number] = value[3:6]
        if value.is_rounded:
            self.rounded.add(number)
        if value.is_too_large:
            self.too_large.add(number)

    def known(self, operand: Operand) -> Passed:
        """Return what is known of a value."""
        if isinstance(operand, Constant):
            kind = seen_kind(self, operand, None)
            return Passed(kind, 0, 0, False, 1, largest(operand.value), False, False)
        return Passed(
            self.kinds[operand],
            self.made[operand],
            self.after[operand],
            self.from_low[operand],
            self.width[operand],
            self.bounds[operand],
            operand in self.rounded,
            operand in self.too_large,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A function and how each of its operations runs."""

    graph: Graph
    settings: Settings
    kinds: tuple[Kind, ...]
    """The kind of each value, by its number."""
    decisions: tuple[Decision, ...]
    levels: tuple[int, ...]
    """The largest number of barriers that lie before each operation, which no island crosses."""
    depths: tuple[int, ...]
    """The same, but as if every `jax.checkpoint` were written out."""
    made: tuple[int, ...]
    """The depth of the operation that makes each value."""
    rounded: frozenset[int]
    """Wide values that are read in the compute dtype by operations of a larger depth."""
    too_large: frozenset[int] = frozenset()
    """Wide values that stay float32 after a barrier, because float16 may not hold them."""
    reads: Mapping[int, Mapping[int, Kind]] = dataclasses.field(
        default_factory=dict[int, Mapping[int, Kind]]
    )
    """The kinds in which operations read values, where it is not for their depth to say."""
    results: tuple[Passed, ...] = ()
    """The function's results as its plan knows them."""
    stacked: frozenset[int] = frozenset()
    """Inputs in float32 that each iteration of a loop gets from the one before it. They are stored
    in the compute dtype."""

    @property
    def has_barrier(self) -> bool:
        """Whether anything in the plan must not be recomputed."""
        return any(decision.barrier for decision in self.decisions)

    @functools.cached_property
    def roundings(self) -> tuple[Rounding, ...]:
        """Whether the readers of each value have to settle its rounding, by its number."""
        found = [Rounding.SETTLED] * len(self.graph.avals)
        for number in self.graph.inputs:
            if self.kinds[number] is Kind.LOW:
                # The compiler inlines calls, so an input may be the result of arithmetic.
                found[number] = Rounding.LOOSE
        for node, decision in zip(self.graph.nodes, self.decisions, strict=True):
            rounding = _rounding(node, decision, found)
            for number, kind in zip(node.outs, decision.outs, strict=True):
                if kind.is_low:
                    found[number] = rounding
        return tuple(found)

    def maker(self, operand: Operand) -> int | None:
        """Return the operation that makes a value, if one of the plan does."""
        return self.graph.maker(operand)

    def seen(self, operand: Operand, index: int) -> Kind:
        """Return the kind of an operand for an operation."""
        return seen_kind(self, operand, index)

    def out_kind(self, operand: Operand) -> Kind:
        """Return the kind of a value for what comes after the function."""
        return seen_kind(self, operand, None)


def _rounding(node: Node, decision: Decision, found: Sequence[Rounding]) -> Rounding:
    """Return how settled the rounding of an operation's results in the compute dtype is."""
    if decision.inner is not None or decision.site is not None:
        return Rounding.LOOSE
    if decision.dtype == FLOAT32:
        # The result is cast where it is made.
        return Rounding.SETTLED
    if node.name in CONTRACTIONS:
        return Rounding.LOOSE_ON_CPU
    if node.name in PASSING:
        values = (operand for operand in node.ins if not isinstance(operand, Constant))
        return max((found[value] for value in values), default=Rounding.SETTLED)
    return Rounding.LOOSE


def seen_kind(state: Plan | Draft, operand: Operand, index: int | None) -> Kind:
    """Return the kind of an operand for an operation, in a plan or a draft.

    Without an operation: for what comes after the function.
    """
    compute = state.settings.compute
    if isinstance(operand, Constant):
        if not is_subject(operand.aval, compute):
            return Kind.OTHER
        return constant_kind(operand.value, compute)
    if index is not None and operand in state.reads.get(index, ()):
        return state.reads[index][operand]
    kind = state.kinds[operand]
    # A wide value is wide for its neighbors, between the same two barriers. Operations that read it
    # later, or outside the function, read it rounded. Nothing else decides about this: whether a
    # value is stored or recomputed never changes what its readers see.
    crossed = index is None or state.made[operand] < state.depths[index]
    return Kind.LOW if crossed and kind is Kind.WIDE and operand in state.rounded else kind


def largest(value: Any) -> float:
    """Return the largest magnitude in a constant; infinite for one without numbers (float0)."""
    array = np.asarray(value)
    if not jnp.issubdtype(array.dtype, np.number) and array.dtype != np.dtype(bool):
        return math.inf
    return float(np.max(np.abs(array), initial=0))


def held_dtype(aval: AbstractValue, kind: Kind, compute: np.dtype) -> np.dtype | None:
    """Return the dtype in which a value is held; `None` if autocast does not choose it."""
    if not is_subject(aval, compute):
        return None
    return compute if kind.is_low else FLOAT32


def out_kinds(plan: Plan) -> list[Kind]:
    """Return the kinds of a function's results."""
    return [plan.out_kind(operand) for operand in plan.graph.outputs]


def decided(plan: Plan) -> Iterator[tuple[Plan, int]]:
    """Yield all operations of a plan and of the plans inside it, each with its own plan."""
    for index, decision in enumerate(plan.decisions):
        yield plan, index
        for inner in inner_plans(decision.inner):
            yield from decided(inner)


def inner_plans(inner: object) -> Iterator[Plan]:
    """Yield the plans that a decision holds."""
    if isinstance(inner, Plan):
        yield inner
    elif isinstance(inner, tuple):
        for item in inner:
            yield from inner_plans(item)


# The products of a plan that have a place in a recipe's state: their names, and their slots.


class Named(NamedTuple):
    """A product of a plan; in loops, one product per iteration."""

    name: str
    site: RecipeProduct
    turns: tuple[int, ...]
    """The lengths of the loops that it is in, the outermost first."""


def named_sites(plan: Plan) -> list[Named]:
    """Return all products with a place in a recipe's state, in the order they are written in."""
    numbers: collections.Counter[str] = collections.Counter()
    found = []
    for base, site, turns in _sites(plan, ()):
        number = numbers[base]
        numbers[base] += 1
        found.append(Named(f"{base}.{number}", site, turns))
    return found


def _sites(
    plan: Plan, turns: tuple[int, ...]
) -> Iterator[tuple[str, RecipeProduct, tuple[int, ...]]]:
    for node, decision in zip(plan.graph.nodes, plan.decisions, strict=True):
        if decision.site is not None and plan.settings.has_state:
            scope = plain_scope(node.scope)
            yield f"{scope}/{node.name}" if scope else node.name, decision.site, turns
        structure = node.structure
        more = (structure.length,) if isinstance(structure, Scan) else ()
        for inner in inner_plans(decision.inner):
            yield from _sites(inner, (*turns, *more))


def check_sites(have: Sequence[str], want: Sequence[str]) -> None:
    """Raise unless the state belongs to the products of a function.

    Args:
        have: The names of the products in the state.
        want: The names of the function's products.
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
    """Return the slot of each product, by its place in the plan."""
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
