"""Run a planned function."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep._autocast import custom_rules, nested
from halfstep._autocast.again.islands import before_calls, is_wide, joined
from halfstep._autocast.again.recompute import difference, recomputed, together
from halfstep._autocast.again.regions import Region, factors_of, schedule
from halfstep._autocast.again.repeats import Repeat, Unit, with_repeats
from halfstep._autocast.again.replay import differentiated_once
from halfstep._autocast.again.signatures import Signatures, shared_scopes
from halfstep._autocast.again.surroundings import Surroundings
from halfstep._autocast.contract import contract
from halfstep._autocast.decide import bind_by
from halfstep._autocast.f8.product import OFF, Slots
from halfstep._autocast.kinds import Kind
from halfstep._autocast.one_of_row import one_of_row, row_axis
from halfstep._autocast.plans import FLOAT32, Plan, held_dtype
from halfstep._autocast.primitives import CONTRACTIONS, PASSING, Rule
from halfstep._autocast.stored.names import HALF, Store, stored
from halfstep._autocast.stored.saves import Again
from halfstep._base import Rounding, cast, representable, settled, widened
from halfstep._program import (
    Constant,
    Interpreter,
    LinearSolve,
    Node,
    Opaque,
    Operand,
    as_linear_as_said,
    bind_again,
)

_RUNNERS = MappingProxyType({**nested.RUNNERS, **custom_rules.RUNNERS})
# Arithmetic on two operands; one of them may have dimensions of size 1.
_SPREADS = frozenset({"add", "add_any", "div", "max", "min", "mul", "sub"})

_STACKED = Store(HALF).named("scan")
_ARITHMETIC = frozenset({"add", "div", "mul", "sub"})
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def run(
    plan: Plan,
    values: Sequence[Any],
    out_kinds: Sequence[Kind],
    *,
    place: Surroundings = Surroundings.WHOLE,
    slots: Slots | None = None,
    sharing: "Sharing | None" = None,
) -> list[Any]:
    """Run a plan on values that are held as its inputs' kinds say.

    Args:
        plan: The plan to run.
        values: The values of its inputs.
        out_kinds: The kinds in which its outputs are wanted.
        place: Whether the plan is a whole function, or the body of a call or a loop.
        slots: The recipe's state for the plan's products, by the number of the operation.
        sharing: The functions that parts of the plan share, if the caller keeps them.
    """
    env = Environment(plan, place, slots=slots, sharing=sharing)
    env.enter(values)
    is_repeated = (
        place is Surroundings.WHOLE
        and slots is None
        and plan.settings.saves.again is not Again.MOST
    )
    repeated = env.sharing.repeated
    for unit in repeated(out_kinds) if is_repeated else schedule(plan, out_kinds, place):
        if isinstance(unit, Repeat):
            _run_repeat(env, unit)
        else:
            _run_unit(env, unit)
    return [
        env.read_where_made(operand, held(plan, operand, kind))
        for operand, kind in zip(plan.graph.outputs, out_kinds, strict=True)
    ]


def held(plan: Plan, operand: Operand, kind: Kind) -> np.dtype | None:
    """Return the dtype in which a plan holds a value of a kind."""
    return held_dtype(plan.graph.aval(operand), kind, plan.settings.compute)


AsOne = Callable[[Callable[..., Any]], Callable[..., Any]]


class Sharing:
    """The functions that several regions, calls or layers of a plan are.

    They live as long as one run of the plan. Functions in here must not close over an environment:
    JAX keeps them with the program, and values of a trace that is over with them.
    """

    def __init__(
        self, plan: Plan, as_one: AsOne = differentiated_once, *, regions_alone: bool = False
    ) -> None:
        """Begin without functions.

        Args:
            plan: The plan.
            as_one: Makes one function of the operations that layers repeat.
            regions_alone: Whether to do so with regions that are repeated alone, too.
        """
        self.plan, self.as_one, self.regions_alone = plan, as_one, regions_alone
        self.signatures = Signatures(plan)
        self.functions: dict[Hashable, Callable[..., Any]] = {}
        self.repeats: dict[Hashable, tuple[Callable[..., Any], list[Any]]] = {}
        """The functions of repeats; each with the places and dtypes of what it returns."""
        self._low_differences: dict[Surroundings, frozenset[int]] = {}
        self._repeated: dict[tuple[Kind, ...], list[Unit | Repeat]] = {}

    @functools.cached_property
    def later(self) -> set[int]:
        """The operations that a contraction comes after, or anything that may contain one."""
        return before_calls(self.plan)

    @functools.cached_property
    def joined(self) -> frozenset[int]:
        """The products whose cotangents leave together."""
        return joined(self.plan)

    def low_differences(self, place: Surroundings) -> frozenset[int]:
        """Return the operations `x - max(x)` that XLA:TPU computes in the compute dtype.

        Not those after the last contraction, which make the loss, nor those that make state.
        """
        if place not in self._low_differences:
            plan = self.plan
            self._low_differences[place] = frozenset(
                index
                for index, node in enumerate(plan.graph.nodes)
                if node.name == "sub"
                and plan.decisions[index].rule is Rule.FLOAT32
                and plan.settings.rounds
                and index not in plan.reads
                and (not place.is_last or index in self.later)
                and is_wide(plan, index)
            )
        return self._low_differences[place]

    def repeated(self, out_kinds: Sequence[Kind]) -> list[Unit | Repeat]:
        """Return the schedule of the plan, in which what layers repeat is gathered."""
        key = tuple(out_kinds)
        if key not in self._repeated:
            is_most = self.plan.settings.saves.again is Again.MOST
            count = len(self.plan.graph.nodes)
            units = list(range(count)) if is_most else schedule(self.plan, out_kinds)
            self._repeated[key] = with_repeats(
                self.plan, units, self.signatures, regions_alone=self.regions_alone
            )
        return self._repeated[key]


class Environment(Interpreter[Any]):
    """Runs operations as a plan says; values are held in one or both of the two dtypes."""

    def __init__(
        self,
        plan: Plan,
        place: Surroundings,
        *,
        slots: Slots | None = None,
        entered: int = 0,
        sharing: "Sharing | None" = None,
        has_names: bool = False,
    ):
        super().__init__(plan.graph, entered=entered)
        self.plan = plan
        self.place = place
        self.slots = slots
        self.has_names = has_names
        self.others: dict[tuple[int, np.dtype], Any] = {}
        self.sharing = sharing or Sharing(plan)

    def operand(self, operand: Operand, index: int) -> Any:
        return operand_of(self, operand, index)

    def bind(self, index: int, operands: Sequence[Any]) -> list[Any]:
        results = bind(self, index, operands)
        pairs = zip(self.graph.nodes[index].outs, self.plan.decisions[index].outs, strict=True)
        dtypes = [held(self.plan, number, kind) for number, kind in pairs]
        results = [
            result if dtype is None or result.dtype == dtype else cast(result, dtype)
            for result, dtype in zip(results, dtypes, strict=True)
        ]
        return [self.keep(result, index) for result in results]

    def hold(self, number: int, dtype: np.dtype | None, value: Any) -> None:
        """Keep a value as it was made, for `None`, or in another dtype."""
        if dtype is None:
            self.write(number, value)
        else:
            self.others[number, dtype] = value

    def keep(self, value: Any, index: int | None) -> Any:
        """Return a result of an operation, kept for the backward pass as the plan says."""
        store = None if index is None else self.plan.decisions[index].store
        settings = self.plan.settings
        # Outside of a region, JAX stores what it needs. Under a name, it would store it twice.
        if store is None or (settings.saves.is_own and not self.has_names):
            return value
        if settings.saves.again is Again.MOST and self.place is Surroundings.LOOP:
            store = dataclasses.replace(store, barred=False)
        return stored(value, store, compute=settings.compute)

    def read_as(self, operand: Operand, dtype: np.dtype | None) -> Any:
        """Return a value in a dtype; for `None`, as it is held."""
        if isinstance(operand, Constant):
            value = operand.value
            if dtype is None:
                return value
            # A user's rule may want `1e6` in float16: that is infinity, without a warning.
            with np.errstate(over="ignore"):
                return np.asarray(value, dtype)
        value = self.values[operand]
        if dtype is None or value.dtype == dtype:
            return value
        key = (operand, dtype)
        if key not in self.others:
            rounding = self.plan.roundings[operand]
            is_wider = dtype == FLOAT32 and value.dtype == self.plan.settings.compute
            self.others[key] = widened(value, rounding) if is_wider else cast(value, dtype)
        return self.others[key]

    def read_settled(self, operand: Operand, dtype: np.dtype | None, *, by_product: bool) -> Any:
        """Return a value for a reader in the compute dtype, which rounds its own result.

        A product's factor is rounded when it is read, except on CPUs, which widen the factor.
        """
        value = self.read_as(operand, dtype)
        if isinstance(operand, Constant) or dtype == FLOAT32:
            return value
        if not self.plan.kinds[operand].is_low:
            # The value is a parameter or wide, and was cast. The cast rounds on CPUs, which is all
            # that a product needs.
            return value if by_product else settled(value)
        rounding = self.plan.roundings[operand]
        return settled(value, min(rounding, Rounding.LOOSE_ON_CPU) if by_product else rounding)

    def read_where_made(self, operand: Operand, dtype: np.dtype | None) -> Any:
        """Return a value in a dtype; a cast gets the line and the scopes of the value's maker."""
        maker = self.plan.maker(operand)
        if maker is None:
            return self.read_as(operand, dtype)
        with self.plan.graph.nodes[maker].in_scope(self.entered):
            return self.read_as(operand, dtype)


def operand_of(env: Environment, operand: Operand, index: int) -> Any:
    """Return an operand in the dtype that the operation takes."""
    plan, decision = env.plan, env.plan.decisions[index]
    kind = plan.seen(operand, index)
    dtype = held(plan, operand, kind)
    if decision.inner is not None or decision.function is not None or dtype is None:
        return env.read_as(operand, dtype)
    is_param = kind.yields and decision.rule is Rule.COMPUTE
    if is_param and (_has_own_gradients(plan, index) or decision.site is not None):
        # A parameter whose gradient is to be wider than the product's operands, or that is rounded
        # once, to 8 or 4 bits.
        return env.read_as(operand, FLOAT32)
    node = plan.graph.nodes[index]
    if node.name == "convert_element_type":
        # The user converts to another dtype.
        return env.read_settled(operand, dtype, by_product=False)
    if kind.is_low and decision.dtype == FLOAT32 and not isinstance(operand, Constant):
        # After a barrier, all readers see a value as it was stored.
        return widened(env.read_as(operand, dtype), plan.roundings[operand])
    if node.name in _SPREADS and _is_spread(plan, operand, kind, index):
        # The operand is broadcast in float32 and cast afterwards, so that its gradient is added up
        # in float32. It is rounded before that, while it is small: XLA would otherwise keep the
        # rounded value for every element.
        shape = plan.graph.avals[node.outs[0]].shape
        value = representable(env.read_as(operand, FLOAT32), decision.dtype)
        return jax.lax.convert_element_type(jnp.broadcast_to(value, shape), decision.dtype)
    if _takes_inexact_literal(node, decision.dtype):
        return env.read_as(operand, FLOAT32)
    if node.name in PASSING or _asks_for_a_sign(node):
        return env.read_as(operand, decision.dtype)
    is_product = node.name in CONTRACTIONS and decision.site is None
    return env.read_settled(operand, decision.dtype, by_product=is_product)


def _takes_inexact_literal(node: Node, dtype: np.dtype) -> bool:
    """Return whether a dtype would round a number that the program names, such as 0.9.

    Such an operation runs in float32, and its result is rounded once. The error of a rounded number
    is the same wherever it is read, so it grows with every iteration: 0.9 is 0.8984 in bfloat16,
    and its 40th power 7 % too small.
    """
    if dtype == FLOAT32 or node.name not in _ARITHMETIC:
        return False
    with np.errstate(over="ignore"):
        return any(
            np.ndim(operand.value) == 0 and np.asarray(operand.value, dtype) != operand.value
            for operand in node.ins
            if isinstance(operand, Constant)
        )


def _asks_for_a_sign(node: Node) -> bool:
    """Return whether an operation compares with zero, as the gradient of `relu` does.

    Rounding never changes a sign, and XLA would keep the rounded value in addition to the other.
    """
    zeros = (isinstance(other, Constant) and not np.any(other.value) for other in node.ins)
    return node.name in _COMPARISONS and any(zeros)


def _is_spread(plan: Plan, operand: Operand, kind: Kind, index: int) -> bool:
    """Return whether arithmetic in the compute dtype broadcasts a parameter, such as a bias."""
    decision = plan.decisions[index]
    if not kind.yields or decision.rule is not Rule.WIDEST or decision.dtype == FLOAT32:
        return False
    own, shape = (
        plan.graph.aval(operand).shape,
        plan.graph.avals[plan.graph.nodes[index].outs[0]].shape,
    )
    return not isinstance(operand, Constant) and own != shape


def bind(env: Environment, index: int, operands: Sequence[Any]) -> Iterable[Any]:
    """Run one operation."""
    plan = env.plan
    node, decision = plan.graph.nodes[index], plan.decisions[index]
    slots = None if env.slots is None else env.slots.get(index)
    if decision.site is not None and slots is not OFF:
        return [decision.site(operands, slots)]
    if decision.inner is not None:
        is_last = index not in env.sharing.later
        place = env.place.within(node.name, is_last=is_last)
        inside = functools.partial(run, place=place)
        if node.name in nested.RECOMPUTED:
            func = nested.recomputed(node, decision, inside)
            key = (place, env.sharing.signatures.call(index))
            return env.sharing.functions.setdefault(key, func)(slots, *operands)
        call = nested.Call(node, decision, operands, plan.settings, inside, slots)
        return _RUNNERS[node.name](call)
    if decision.function is not None:
        return bind_by(decision.function, node, plan.graph, plan.settings.compute, operands)
    params = dict(node.params)
    if index in env.sharing.low_differences(env.place):
        left, right = operands
        return [difference(left, right, compute=plan.settings.compute)]
    if decision.rule is Rule.COMPUTE and node.name in CONTRACTIONS:
        wide = [operand.dtype == FLOAT32 for operand in operands[:2]]
        out = FLOAT32 if Kind.WIDE in decision.outs else decision.dtype
        reduce = plan.settings.reduce or decision.dtype
        gradients = [reduce if is_wide else decision.dtype for is_wide in wide]
        types: Any = {"compute": decision.dtype, "out": out, "gradients": gradients}
        if any(wide) or out == FLOAT32:
            return [contract(node.primitive, params, operands, **types)]
    if decision.rule is Rule.COMPUTE and params.get("preferred_element_type") == FLOAT32:
        params["preferred_element_type"] = decision.dtype
    if decision.rule is Rule.FOLLOW and node.name in CONTRACTIONS:
        # The product only picks. In the default precision accelerators round float32 factors.
        params["precision"] = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
    if node.name in LinearSolve.names and plan.settings.compute == np.float16:
        # bfloat16 overflows where float32 does, so for bfloat16 the function stays as written.
        params = as_linear_as_said(params, len(operands))
    axis = row_axis(node, plan.graph)
    if axis is not None:
        return [one_of_row(*operands, axis=axis, **params)]
    if index in env.sharing.joined and env.place is not Surroundings.LOOP:
        return [together(lambda *values: bind_again(node.primitive, params, values)[0])(*operands)]
    try:
        return bind_again(node.primitive, params, operands)
    except NotImplementedError as error:
        if decision.known and not isinstance(node.structure, Opaque):
            raise
        name = node.structure.label if isinstance(node.structure, Opaque) else node.name
        raise NotImplementedError(
            f"`{name}` runs as it is written, and JAX needs a rule for it here that it does not "
            f"have: {error} Plain JAX needs it, too. Give the operation this rule, or keep it out "
            "of what is differentiated or mapped: `jax.lax.stop_gradient` on its operands."
        ) from error


def _has_own_gradients(plan: Plan, index: int) -> bool:
    """Return whether a contraction makes the gradients of parameters in a dtype of their own."""
    reduce = plan.settings.reduce
    wider = reduce is not None and reduce != plan.settings.compute
    return wider and plan.graph.nodes[index].name in CONTRACTIONS


def _run_unit(env: Environment, unit: Unit) -> None:
    if isinstance(unit, Region):
        _run_region(env, unit)
    else:
        env.step(unit)


def _run_region(env: Environment, region: Region) -> None:
    plan, place, sharing = env.plan, env.place, env.sharing
    # A region with stores runs with the state of recipes, and is not shared.
    slots = env.slots if region.has_names else None
    entered = 0 if region.has_names else shared_scopes(plan, region.nodes)
    compute = plan.settings.compute

    def inside(*values: Any) -> tuple[Any, ...]:
        how: Any = {"slots": slots, "sharing": sharing, "has_names": region.has_names}
        inner = Environment(plan, place, entered=entered, **how)
        for number, value in zip(region.inputs, values, strict=True):
            made = value
            if region.has_names:
                # Otherwise the input would be kept as it is, in addition to its code.
                made = stored(value, _STACKED, compute=compute) if number in plan.stacked else made
                made = inner.keep(made, plan.maker(number))
            inner.write(number, made)
        for index in region.nodes:
            inner.step(index)
        return tuple(inner.read_where_made(number, dtype) for number, dtype in region.outputs)

    first = plan.graph.nodes[region.nodes[0]]
    with first.in_scope(env.entered):
        inputs = [env.read_as(number, dtype) for number, dtype in region.reads]
    # In a loop, nothing merges a computation with its recomputation.
    last = place is Surroundings.WHOLE and region.is_last
    barred = place is not Surroundings.LOOP and not last
    func = recomputed(
        inside,
        barred=barred,
        only_gpu=plan.settings.saves.again is Again.TWICE,
        merges=region.is_alone,
        factors=factors_of(plan, region),
        has_names=region.has_names,
    )
    if not region.has_names:
        key = (barred, region.is_alone, sharing.signatures.region(region))
        func = sharing.functions.setdefault(key, func)
    with first.in_scope(env.entered, entered):
        results = func(*inputs)
    # A value may be there in both dtypes.
    for (number, dtype), result in zip(region.outputs, results, strict=True):
        if number in env.values:
            env.others[number, np.dtype(dtype)] = result
        else:
            env.write(number, result)


def _run_repeat(env: Environment, repeat: Repeat) -> None:
    """Run what layers repeat. A value that is held in both dtypes goes in and out in both."""
    plan, place, sharing = env.plan, env.place, env.sharing
    cast_to: dict[int, list[np.dtype]] = {}
    for number, dtype in env.others:
        cast_to.setdefault(number, []).append(dtype)
    reads = [
        (number, dtype) for number in repeat.inputs for dtype in (None, *cast_to.get(number, ()))
    ]
    positions = {number: position for position, number in enumerate(repeat.values)}
    key = (repeat.signature, tuple((positions[number], dtype) for number, dtype in reads))
    found: list[tuple[int, np.dtype | None]] = []

    def inside(*values: Any) -> tuple[Any, ...]:
        inner = Environment(plan, place, entered=repeat.entered, sharing=sharing)
        for (number, dtype), value in zip(reads, values, strict=True):
            inner.hold(number, dtype, value)
        for unit in repeat.units:
            _run_unit(inner, unit)
        made = {(number, None): value for number, value in inner.values.items()} | inner.others
        out = {
            (positions[number], dtype): value
            for (number, dtype), value in made.items()
            if positions[number] in repeat.wanted and (number, dtype) not in reads
        }
        found[:] = out
        return tuple(out.values())

    func, outputs = sharing.repeats.setdefault(key, (sharing.as_one(inside), found))
    given = [
        env.values[number] if dtype is None else env.others[number, dtype]
        for number, dtype in reads
    ]
    with plan.graph.nodes[repeat.nodes[0]].in_scope(env.entered, repeat.entered):
        results = func(*given)
    for (position, dtype), result in zip(outputs, results, strict=True):
        env.hold(repeat.values[position], dtype, result)
