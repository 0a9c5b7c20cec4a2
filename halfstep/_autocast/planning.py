"""Decide, before anything runs, in which precision every operation of a function runs."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from jax.ref import AbstractRef

from halfstep._autocast.choice import cheap_products, chosen_for
from halfstep._autocast.decide import decide, operation_of, read_carries
from halfstep._autocast.kinds import Kind, constant_kind, is_subject
from halfstep._autocast.matching import RuleMatches, lines_of
from halfstep._autocast.plans import (
    Around,
    Decision,
    Draft,
    Passed,
    Plan,
    Settings,
    held_dtype,
    largest,
    seen_kind,
)
from halfstep._autocast.primitives import COLLECTIVES, PASSING, Rule
from halfstep._autocast.state import (
    NO_STATE,
    StatePath,
    contracts,
    exact_operands,
    feeding_nodes,
    is_float,
    state_nodes,
)
from halfstep._autocast.stored.saves import Again, Saves
from halfstep._policy import StoreRule
from halfstep._program import (
    Constant,
    CustomJvp,
    Finder,
    Graph,
    Node,
    Operand,
    Remat,
    is_traced,
    size,
)

LARGEST = float(np.finfo(np.float16).max)


def plan(
    graph: Graph,
    in_kinds: Sequence[Kind],
    settings: Settings,
    *,
    tangents: Collection[int] = (),
    path: StatePath = NO_STATE,
    entering: Sequence[Passed] = (),
) -> Plan:
    """Decide how every operation of a graph runs, given the kinds of its inputs.

    Args:
        graph: The function.
        in_kinds: The kind of each input.
        settings: What the user has asked for.
        tangents: Positions of inputs in which the function must stay linear, because JAX
            transposes it: the tangents of a `custom_jvp`'s rule. Recipes and stores do not apply to
            values that are made of them.
        path: Where the state of a loop around the function enters and leaves it, and which of its
            inputs are weights. State is never rounded.
        entering: The inputs as the caller knows them, if the operations count as the caller's.
    """
    settings = chosen_for(settings, graph)
    draft = _draft(graph, in_kinds, settings, path, entering)
    paths = state_nodes(graph, path)
    feeding = feeding_nodes(graph, path, paths)
    nothing = Saves(again=Again.NOTHING)
    of_tangents = dataclasses.replace(settings, saves=nothing, is_linear=True)
    linear = {graph.inputs[position] for position in tangents}
    rules = settings.saves.rules
    numbered = [rule for rule in rules if rule.number is not None]
    # The finder looks for the folders of libraries, and keeps what it has found.
    finder = Finder() if numbered or any(rule.line is not None for rule in rules) else None
    targets = RuleMatches(graph, finder).numbered(numbered) if finder and numbered else {}
    decisions: list[Decision] = []
    # Effects keep their order: each comes after the one before it, as if it took that one's result.
    after_effects = 0
    for index, node in enumerate(graph.nodes):
        values = [operand for operand in node.ins if not isinstance(operand, Constant)]
        # The level of an operation is the number of barriers on the longest path to it. An island
        # never crosses a barrier, so it is made of operations of one level. The depth is the same
        # without the barriers that a `jax.checkpoint` of the user's is: see `Passed`.
        level = max((draft.passed[value] for value in values), default=0)
        depth = max((draft.after[value] for value in values), default=0)
        if node.effects:
            level, depth = max(level, after_effects), max(depth, after_effects)
        draft.levels.append(level)
        draft.depths.append(depth)
        through = paths.get(index, NO_STATE)._replace(fed=feeding.get(index, frozenset()))
        around = _around(draft, index, through)
        kinds = [seen_kind(draft, operand, index) for operand in node.ins]
        if (
            node.name == "name"
            and not around.path.outs
            and kinds[0] is Kind.WIDE
            and _may_be_rounded(draft, node.ins[0])
        ):
            # The value is named so that `jax.checkpoint` can save it or move it to the host. It is
            # kept in 16 bits, like everything that is kept for the backward pass.
            kinds = [Kind.LOW]
        is_linear = not linear.isdisjoint(values)
        chosen = of_tangents if is_linear else settings
        decision = decide(node, graph, kinds, chosen, plan, around)
        if is_linear:
            linear.update(node.outs)
        elif settings.saves.names_values and _is_one_value(node, decision):
            own = targets.get(index, ())
            decision = _with_store(decision, node, graph, kinds, settings, finder, own)
        decisions.append(decision)
        if node.effects:
            after_effects = max(level, depth) + decision.barrier
        _record(draft, index, decision, kinds, around.path)
    if settings.saves.again is Again.MOST and settings.saves.code is None:
        for index in cheap_products(graph, settings.compute, draft.weights.__getitem__):
            made = decisions[index]
            if made.rule is Rule.COMPUTE and made.site is None and not made.stored_by:
                decisions[index] = dataclasses.replace(made, store=None)
    return Plan(
        graph,
        settings,
        tuple(draft.kinds),
        tuple(decisions),
        tuple(draft.levels),
        tuple(draft.depths),
        tuple(draft.made),
        frozenset(draft.rounded),
        frozenset(draft.too_large),
        draft.reads,
        tuple(map(draft.known, graph.outputs)),
    )


def _draft(
    graph: Graph,
    in_kinds: Sequence[Kind],
    settings: Settings,
    path: StatePath,
    entering: Sequence[Passed],
) -> Draft:
    """Return a plan that knows its inputs and constants."""
    draft = Draft(graph, settings)
    for number, kind in zip(graph.inputs, in_kinds, strict=True):
        draft.kinds[number] = kind
        draft.from_low[number] = kind.is_low
        draft.weights[number] = kind.is_weight
    for position in path.weights:
        draft.weights[graph.inputs[position]] = True
    for number, value in zip(graph.inputs, entering, strict=False):
        draft.enter(number, value)
    for number, value in graph.constants:
        if is_subject(graph.avals[number], settings.compute):
            # A value that a function closes over may belong to an outer trace: nothing is known
            # about it, and it may be a target of 100,000.
            known = not is_traced(value)
            draft.kinds[number] = constant_kind(value, settings.compute) if known else Kind.WIDE
    return draft


def _around(draft: Draft, index: int, path: StatePath) -> Around:
    """Return what the functions inside an operation are told, and how it reads its operands."""
    graph, node = draft.graph, draft.graph.nodes[index]
    weights = (
        p for p, o in enumerate(node.ins) if not isinstance(o, Constant) and draft.weights[o]
    )
    path = path._replace(weights=frozenset(weights))
    carries = read_carries(node, graph, draft.settings, path)
    if isinstance(node.structure, Remat):
        return Around(carries, path, tuple(map(draft.known, node.ins)))
    exact = range(len(node.ins)) if path.outs else ()
    if node.is_call:
        exact = exact_operands(node, carries, path)
    operands = [o for p in exact if not isinstance(o := node.ins[p], Constant)]
    if operands:
        draft.reads[index] = {operand: draft.kinds[operand] for operand in operands}
    return Around(carries, path)


def _is_one_value(node: Node, decision: Decision) -> bool:
    """Return whether an operation's results can be stored: not a loop's, whose body has its own.

    A function with a derivative of its own, such as `relu`, is recomputed as one operation.
    """
    return decision.inner is None or isinstance(node.structure, CustomJvp)


def _may_be_rounded(draft: Draft, operand: Operand) -> bool:
    """Return whether the compute dtype may hold a wide value: not a reduced or large one."""
    if isinstance(operand, Constant):
        return False
    fits = draft.settings.compute != np.dtype(np.float16) or draft.bounds[operand] <= LARGEST
    return fits and 2 * size(draft.graph.avals[operand]) >= draft.width[operand]


def _with_store(
    decision: Decision,
    node: Node,
    graph: Graph,
    kinds: Sequence[Kind],
    settings: Settings,
    finder: Finder | None,
    numbered: Collection[StoreRule],
) -> Decision:
    """Return a decision that says how the results are kept for the backward pass."""
    saves = settings.saves
    # A value that is made of parameters and constants alone is kept with those. JAX keeps the
    # results of effects, and a `Ref` is a place, not a value.
    is_place = any(isinstance(graph.avals[number], AbstractRef) for number in node.outs)
    if node.effects or is_place or all(kind.is_weight for kind in decision.outs):
        return decision
    avals = []
    for operand, kind in zip(node.ins, kinds, strict=True):
        aval = graph.aval(operand)
        dtype = held_dtype(aval, kind, settings.compute)
        avals.append(aval if dtype is None else aval.update(dtype=dtype))
    store, by = saves.by_policy(node.primitive, avals, node.params, dear=decision.barrier), ""
    if saves.rules:
        lines = () if finder is None else lines_of(node, finder)
        dear = decision.barrier or store is not None
        rule = saves.chosen(operation_of(node, graph), lines, dear=dear, numbered=numbered)
        if rule is not None:
            store, by = saves.by_rule(rule), str(rule)
    store = None if store is None else store.named(node.name, by)
    return dataclasses.replace(decision, store=store, stored_by=by)


def _record(
    draft: Draft, index: int, decision: Decision, kinds: Sequence[Kind], path: StatePath
) -> None:
    """Record what an operation makes, and whether readers after the next barrier see it rounded."""
    node, level, depth = draft.graph.nodes[index], draft.levels[index], draft.depths[index]
    for number in node.outs:
        # A value that a rule stores ends an island, too.
        draft.passed[number] = level + (decision.barrier or decision.store is not None)
        draft.made[number], draft.after[number] = depth, depth + decision.barrier
    if isinstance(node.structure, Remat) and isinstance(decision.inner, Plan):
        operands = zip(node.ins, decision.inner.graph.inputs, strict=True)
        draft.reads[index] = {
            operand: decision.inner.kinds[number]
            for operand, number in operands
            if not isinstance(operand, Constant)
        }
        for number, value in zip(node.outs, decision.inner.results, strict=True):
            draft.enter(number, value)
        return
    graph, settings = draft.graph, draft.settings
    values = [operand for operand in node.ins if not isinstance(operand, Constant)]
    # A collective hands on its operands: an exact loss is as exact when devices average it.
    is_new = decision.barrier and node.name not in COLLECTIVES
    from_low = any(draft.from_low[value] for value in values) or is_new
    # Only float16 has a smaller range than float32.
    limited = settings.compute == np.dtype(np.float16)
    bound = _bound(node, graph, kinds, draft.bounds) if limited else 0.0
    floats = [value for value in values if is_float(graph.avals[value])]
    # A product of weights is not a weight, nor is a mask.
    are_weights = (
        bool(floats) and all(draft.weights[value] for value in floats) and not contracts(node)
    )
    is_mask = node.name == "convert_element_type" and not floats
    # `width` is the size of the largest value since the last barrier that a value is made of. A
    # value with less than half of that size has been reduced.
    same_level = [value for value in values if draft.after[value] == depth]
    width = max((draft.width[value] for value in same_level), default=0)
    handed = max((size(graph.avals[value]) for value in same_level), default=0)
    for position, (number, kind) in enumerate(zip(node.outs, decision.outs, strict=True)):
        draft.kinds[number] = kind
        draft.weights[number] = are_weights or (kind.is_weight and not is_mask)
        draft.from_low[number] = from_low or kind.is_low
        draft.bounds[number] = bound
        own = size(graph.avals[number])
        if is_new:
            draft.width[number] = own
        elif decision.barrier:
            # Gathered or scattered over devices, a value is reduced as much as it was before.
            draft.width[number] = own * width // max(handed, 1)
        else:
            draft.width[number] = max(own, width)
        # A value that has been reduced (a mean, a loss) is small, and stays as exact as it is.
        if (
            settings.rounds
            and kind is Kind.WIDE
            and from_low
            and not is_new
            and position not in path.outs
            and 2 * own >= draft.width[number]
        ):
            (draft.rounded if bound <= LARGEST else draft.too_large).add(number)


# Bounds on the magnitude of values, as far as the operations give them.
#
# Float32 values that are read again after the next contraction are held in the compute dtype.
# Float16 ends at 65,504: a square or a sum may be beyond that, and would be stored as infinity
# where float32 was finite. So a value that is not known to fit stays float32. Bfloat16 has
# float32's range.

_Rule = Callable[[Sequence[float], Node, Graph], float]


def _largest(ins: Sequence[float], *_: object) -> float:
    return max(ins, default=math.inf)


def _first(ins: Sequence[float], *_: object) -> float:
    return ins[0]


def _product(ins: Sequence[float], *_: object) -> float:
    # Nothing is known about zero times infinity.
    return math.inf if math.inf in ins else math.prod(ins)


def _power(ins: Sequence[float], node: Node, _: Graph) -> float:
    exponent = node.params.get("y", 2)
    return ins[0] ** exponent if exponent >= 0 and ins[0] < 1e30 else math.inf


def _quotient(ins: Sequence[float], node: Node, _: Graph) -> float:
    divisor = node.ins[1]
    if not isinstance(divisor, Constant) or not np.all(divisor.value):
        return math.inf
    return ins[0] / float(np.min(np.abs(divisor.value)))


def _total(ins: Sequence[float], node: Node, graph: Graph) -> float:
    return ins[0] * size(graph.aval(node.ins[0])) / max(size(graph.avals[node.outs[0]]), 1)


def _clamped(ins: Sequence[float], *_: object) -> float:
    low, value, high = ins
    return min(value, max(low, high))


# Operations that hand on several values; the others take one value, and then indices.
_OF_SEVERAL = frozenset(
    {
        *("max", "min", "concatenate", "stack", "pad", "optimization_barrier", "device_put"),
        *("pmax", "pmin", "dynamic_update_slice", "scatter"),
    }
)
_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        **dict.fromkeys((*PASSING, "convert_element_type"), _first),
        **dict.fromkeys(_OF_SEVERAL, _largest),
        **dict.fromkeys(("tanh", "logistic", "erf", "sin", "cos", "sign"), lambda *_: 1.0),
        "erfc": lambda *_: 2.0,
        **dict.fromkeys(("add", "sub", "add_any"), lambda ins, *_: sum(ins)),
        "mul": _product,
        **dict.fromkeys(("integer_pow", "square"), _power),
        "div": _quotient,
        "reduce_sum": _total,
        "sqrt": lambda ins, *_: math.sqrt(ins[0]),
        "clamp": _clamped,
        "select_n": lambda ins, *_: max(ins[1:]),
    }
)


def _bound(node: Node, graph: Graph, kinds: Sequence[Kind], bounds: Sequence[float]) -> float:
    """Return the largest magnitude that an operation's results can have.

    Args:
        node: The operation.
        graph: The graph that it is part of.
        kinds: The kinds of its operands.
        bounds: The bound of each value that has been made, by its number.
    """
    rule = _RULES.get(node.name)
    if rule is None:
        return math.inf
    ins = []
    for operand, kind in zip(node.ins, kinds, strict=True):
        if isinstance(operand, Constant):
            ins.append(largest(operand.value))
        else:
            # A value that is stored in float16 is at most float16's maximum.
            ins.append(min(bounds[operand], LARGEST) if kind.is_low else bounds[operand])
    return rule(ins, node, graph)
