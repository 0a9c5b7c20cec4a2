"""Decide, before anything runs, in which precision every operation of a function runs."""

import dataclasses
import math
from collections.abc import Collection, Sequence

import numpy as np

from halfstep._autocast.bounds import LARGEST, bound
from halfstep._autocast.decide import decide
from halfstep._autocast.kinds import Kind, constant_kind, is_subject
from halfstep._autocast.table import COLLECTIVES
from halfstep._autocast.types import Plan, Settings, seen_kind
from halfstep._program import Constant, Graph, is_traced, size


class _State:
    """What is known while a plan is made."""

    def __init__(self, graph: Graph, settings: Settings):
        self.graph, self.settings = graph, settings
        count = len(graph.avals)
        self.kinds: list[Kind] = [Kind.OTHER] * count
        self.after: list[int] = [0] * count
        self.from_low: list[bool] = [False] * count
        self.width: list[int] = [size(aval) for aval in graph.avals]
        self.levels: list[int] = []
        self.rounded: set[int] = set()
        self.too_large: set[int] = set()
        self.bounds: list[float] = [math.inf] * count


def plan(
    graph: Graph,
    in_kinds: Sequence[Kind],
    settings: Settings,
    *,
    tangents: Collection[int] = (),
) -> Plan:
    """Decide for every operation of a graph, given what its inputs are.

    Args:
        graph: The function.
        in_kinds: The kind of each input.
        settings: What is asked for.
        tangents: Positions of inputs in which the function must stay linear, because JAX
            transposes it: those of the rule of a `custom_jvp`. To quantize is not linear, so no
            recipe applies to what is made of them.
    """
    state = _State(graph, settings)
    unquantized = dataclasses.replace(settings, recipe=None)
    linear = {graph.inputs[position] for position in tangents}
    for number, kind in zip(graph.inputs, in_kinds, strict=True):
        state.kinds[number] = kind
        state.from_low[number] = kind.is_low
    for number, value in graph.constants:
        if is_subject(graph.avals[number], settings.compute):
            # What a function closes over may be a value of an outer trace: nothing is known of it,
            # and it may be a target of 100,000.
            known = not is_traced(value)
            state.kinds[number] = constant_kind(value, settings.compute) if known else Kind.WIDE
    decisions = []
    # Effects keep their order: each comes after the one before it, as if it took its result.
    after_effects = 0
    # Only float16 has a smaller range than float32.
    limited = settings.compute == np.dtype(np.float16)
    for node in graph.nodes:
        values = [operand for operand in node.ins if not isinstance(operand, Constant)]
        level = max((state.after[value] for value in values), default=0)
        if node.effects:
            level = max(level, after_effects)
        state.levels.append(level)
        kinds = [seen_kind(state, operand, level) for operand in node.ins]
        is_linear = not linear.isdisjoint(values)
        decision = decide(node, graph, kinds, unquantized if is_linear else settings, plan)
        if is_linear:
            linear.update(node.outs)
        decisions.append(decision)
        if node.effects:
            after_effects = level + decision.barrier
        # A collective hands on what it is given: an exact loss is as exact when devices average it.
        is_new = decision.barrier and node.name not in COLLECTIVES
        from_low = any(state.from_low[value] for value in values) or is_new
        largest = bound(node, graph, kinds, state.bounds) if limited else 0.0
        same_level = [value for value in values if state.after[value] == level]
        width = max((state.width[value] for value in same_level), default=0)
        handed = max((size(graph.avals[value]) for value in same_level), default=0)
        for number, kind in zip(node.outs, decision.outs, strict=True):
            state.kinds[number] = kind
            state.after[number] = level + decision.barrier
            state.from_low[number] = from_low or kind.is_low
            state.bounds[number] = largest
            own = size(graph.avals[number])
            if is_new:
                state.width[number] = own
            elif decision.barrier:
                # Gathered or scattered over devices, a value is reduced as much as it was before.
                state.width[number] = own * width // max(handed, 1)
            else:
                state.width[number] = max(own, width)
            # What has been reduced (a mean, a loss) is small, and stays as exact as it is.
            if (
                settings.islands
                and kind is Kind.WIDE
                and from_low
                and not is_new
                and 2 * own >= state.width[number]
            ):
                (state.rounded if largest <= LARGEST else state.too_large).add(number)
    return Plan(
        graph,
        settings,
        tuple(state.kinds),
        tuple(decisions),
        tuple(state.levels),
        frozenset(state.rounded),
        frozenset(state.too_large),
    )
