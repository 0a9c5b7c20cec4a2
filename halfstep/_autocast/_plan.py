"""Decide, before anything runs, in which precision every operation of a function runs."""

import functools
import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from halfstep._autocast import _calls, _derivatives, _loops
from halfstep._autocast._graph import Constant, Graph, Node, is_scalar_literal, is_traced
from halfstep._autocast._kinds import Kind, constant_kind, is_subject, join
from halfstep._autocast._table import COLLECTIVES, TABLE, Rule
from halfstep._autocast._types import FLOAT32, Decision, Plan, Settings, seen_kind
from halfstep._jaxprs import jaxprs_in

_PLANNERS = MappingProxyType({**_loops.PLANNERS, **_calls.PLANNERS, **_derivatives.PLANNERS})


class _State:
    """What is known while a plan is made."""

    def __init__(self, graph: Graph, settings: Settings):
        self.graph, self.settings = graph, settings
        count = len(graph.avals)
        self.kinds: list[Kind] = [Kind.OTHER] * count
        self.after: list[int] = [0] * count
        self.from_low: list[bool] = [False] * count
        self.width: list[int] = [size(aval) for aval in graph.avals]
        self.producer: list[int | None] = [None] * count
        self.levels: list[int] = []
        self.rounded: set[int] = set()


def size(aval: Any) -> int:
    """How many elements a value has."""
    return math.prod(getattr(aval, "shape", ()))


def plan(graph: Graph, in_kinds: Sequence[Kind], settings: Settings) -> Plan:
    """Decide for every operation of a graph, given what its inputs are."""
    state = _State(graph, settings)
    for number, kind in zip(graph.inputs, in_kinds, strict=True):
        state.kinds[number] = kind
        state.from_low[number] = kind is Kind.LOW
    for number, value in graph.constants:
        if is_subject(graph.avals[number], settings.compute):
            # What a function closes over may be a value of an outer trace: nothing is known of it.
            known = not is_traced(value)
            state.kinds[number] = constant_kind(value, settings.compute) if known else Kind.SOFT
    decisions = []
    for index, node in enumerate(graph.nodes):
        values = [operand for operand in node.ins if not isinstance(operand, Constant)]
        level = max((state.after[value] for value in values), default=0)
        state.levels.append(level)
        kinds = [seen_kind(state, operand, level) for operand in node.ins]
        decision = decide(node, graph, kinds, settings)
        decisions.append(decision)
        from_low = any(state.from_low[value] for value in values) or decision.barrier
        same_level = [value for value in values if state.after[value] == level]
        width = max((state.width[value] for value in same_level), default=0)
        for number, kind in zip(node.outs, decision.outs, strict=True):
            state.kinds[number] = kind
            state.after[number] = level + decision.barrier
            state.from_low[number] = from_low or kind is Kind.LOW
            state.producer[number] = index
            own = size(graph.avals[number])
            state.width[number] = own if decision.barrier else max(own, width)
            # What has been reduced (a mean, a loss) is small, and stays as exact as it is.
            if (
                settings.islands
                and kind is Kind.WIDE
                and from_low
                and not decision.barrier
                and 2 * own >= state.width[number]
            ):
                state.rounded.add(number)
    return Plan(
        graph,
        settings,
        tuple(state.kinds),
        tuple(decisions),
        tuple(state.levels),
        frozenset(state.rounded),
        tuple(state.producer),
    )


def decide(node: Node, graph: Graph, kinds: Sequence[Kind], settings: Settings) -> Decision:
    """How an operation runs, given the kinds of its operands."""
    if node.name in _PLANNERS:
        return _PLANNERS[node.name](node, kinds, settings, plan)
    compute = settings.compute
    rule = TABLE.get(node.name)
    known = rule is not None
    rule = _special(node, graph, rule or Rule.AS_TRACED)
    outs = [graph.avals[number] for number in node.outs]
    widest = join(kinds)
    make = functools.partial(_decision, outs, compute, known=known)
    barrier = node.effects or not known or node.name in COLLECTIVES or node.name == "pallas_call"
    if rule is Rule.COMPUTE:
        lowers = all(is_subject(graph.aval(operand), compute) for operand in node.ins[:2])
        if not lowers or _asks_for_precision(node):
            return make(Rule.AS_TRACED, FLOAT32, Kind.WIDE, barrier=True)
        return make(rule, compute, Kind.LOW, barrier=True)
    if rule is Rule.FLOAT32:
        kind = Kind.SOFT if widest is Kind.SOFT else Kind.WIDE
        return make(rule, FLOAT32, kind, barrier=barrier)
    if rule is Rule.AS_TRACED:
        return make(rule, FLOAT32, _made_as_traced(node, graph, compute), barrier=barrier)
    kind = Kind.SOFT if widest is Kind.OTHER else widest
    dtype = compute if kind is Kind.LOW else FLOAT32
    if node.name == "gather" and kind is Kind.SOFT and isinstance(node.ins[0], int):
        # Looked up in the parameters' own precision, so that gradients are added up in it.
        kind = Kind.LOW
    return make(rule, dtype, kind, barrier=barrier)


def _decision(
    outs: Sequence[Any],
    compute: np.dtype,
    rule: Rule,
    dtype: np.dtype,
    kind: Kind,
    *,
    barrier: bool,
    known: bool,
) -> Decision:
    kinds = tuple(kind if is_subject(aval, compute) else Kind.OTHER for aval in outs)
    return Decision(rule, dtype, kinds, barrier, known)


def _special(node: Node, graph: Graph, rule: Rule) -> Rule:
    if node.name == "div" and is_scalar_literal(node.ins[1]):
        return Rule.WIDEST
    if node.name == "mul" and node.ins[0] == node.ins[1] and isinstance(node.ins[0], int):
        return Rule.FLOAT32
    if node.name == "convert_element_type":
        dtypes = {graph.aval(node.ins[0]).dtype, graph.avals[node.outs[0]].dtype}
        # From float32 to float32: only whether JAX calls it weak changes.
        return Rule.FOLLOW if dtypes == {FLOAT32} else Rule.AS_TRACED
    if node.name == "scatter" and any(inner.eqns for inner in jaxprs_in(node.params)):
        # `x.at[i].apply(f)`: f is a float32 function that is part of the operation.
        return Rule.FLOAT32
    return rule


def _asks_for_precision(node: Node) -> bool:
    precision = node.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    # DEFAULT is 0 and what everybody has who has not asked.
    return any(p is not None and getattr(p, "value", p) not in (0, "DEFAULT") for p in asked)


def _made_as_traced(node: Node, graph: Graph, compute: np.dtype) -> Kind:
    if node.name == "convert_element_type" and graph.aval(node.ins[0]).dtype == np.dtype(bool):
        return Kind.SOFT
    return Kind.SOFT if node.name in ("empty", "empty2") else Kind.WIDE
