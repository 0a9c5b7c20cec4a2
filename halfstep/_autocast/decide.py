"""Decide in which precision one operation runs: by the user's rules, then by the table."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from jax.core import AbstractValue

from halfstep._autocast import custom_rules, nested
from halfstep._autocast.f8.eligible import NO_RECIPE, site_of
from halfstep._autocast.kinds import Kind, is_subject, join
from halfstep._autocast.nested import Planner
from halfstep._autocast.picks import PICKS, is_rounded_by_readers, picking_factor
from halfstep._autocast.plans import FLOAT32, Around, Decision, Settings, held_dtype
from halfstep._autocast.primitives import COLLECTIVES, CONTRACTIONS, DEAR, TABLE, Rule
from halfstep._autocast.state import Carry, Reading, StatePath, carries_of
from halfstep._base import jaxprs_in
from halfstep._policy import KEEP_SCOPE, Operation, PrecisionFunction, PrecisionRule
from halfstep._program import Graph, Node, Operand, Scan, While, is_scalar_literal, size

_PLANNERS = MappingProxyType({**nested.PLANNERS, **custom_rules.PLANNERS})
# Operations that are never recomputed: communication, operations that are expensive to repeat, and
# values that `jax.checkpoint` is told to save, which must not vanish in an island.
_NEVER_AGAIN = COLLECTIVES | DEAR | {"name"}
# `keep_precision` leaves a named scope in the program; the scope acts as a rule that comes before
# those of the policy.
_KEEP = PrecisionRule("float32", scope=KEEP_SCOPE)


def decide(
    node: Node,
    graph: Graph,
    kinds: Sequence[Kind],
    settings: Settings,
    plan: Planner,
    around: Around,
) -> Decision:
    """Decide how an operation runs, given the kinds of its operands."""
    chosen = _chosen(node, graph, settings)
    holds = node.name in _PLANNERS
    if chosen is not None and callable(chosen.outcome) and not holds:
        return _by_function(node, graph, kinds, settings, chosen.outcome, str(chosen))
    given = None
    if chosen is not None and chosen.recipe is not None:
        # A rule that gives a recipe says nothing else about the contraction.
        given, chosen = chosen, None
    outcome = _outcome(node, chosen)
    if holds and outcome is None:
        made = _PLANNERS[node.name](node, kinds, settings, plan, around)
        return dataclasses.replace(made, carries=around.carries)
    compute = settings.compute
    known = holds or node.name in TABLE
    by = "" if outcome is None or chosen is None else str(chosen)
    make = functools.partial(
        _decision, [graph.avals[number] for number in node.outs], compute, known=known, by=by
    )
    barrier = node.effects or not known or node.name in _NEVER_AGAIN
    if holds:
        return make(Rule.AS_TRACED, FLOAT32, Kind.WIDE, barrier=True)
    rule = outcome or _special(node, graph, TABLE.get(node.name, Rule.AS_TRACED))
    if node.name in CONTRACTIONS:
        made = _contraction(node, graph, kinds, settings, rule, make, by, given)
        # Also a rule whose recipe does not apply has matched something.
        return made if given is None else dataclasses.replace(made, recipe_by=str(given))
    if rule is Rule.WIDEST and around.path.fed and outcome is None:
        rule = Rule.FLOAT32
    if rule is Rule.COMPUTE:
        return make(rule, compute, Kind.LOW, barrier=barrier)
    widest = _met(kinds)
    if rule is Rule.FLOAT32:
        kind = widest if widest in (Kind.SOFT, Kind.KEPT) else Kind.WIDE
        return make(rule, FLOAT32, kind, barrier=barrier)
    if rule is Rule.AS_TRACED:
        return make(rule, FLOAT32, _made_as_traced(node, graph, kinds), barrier=barrier)
    kind = Kind.SOFT if widest is Kind.OTHER else widest
    dtype = compute if kind is Kind.LOW else FLOAT32
    if rule is Rule.FOLLOW and join(kinds) is Kind.STORED:
        # The result is still that parameter, in another shape.
        kind = Kind.STORED
    if node.name == "gather" and kind is Kind.SOFT and isinstance(node.ins[0], int):
        # Values are looked up in the parameter's own precision, so that gradients add up in it.
        kind = Kind.LOW
    return make(rule, dtype, kind, barrier=barrier)


def _met(kinds: Sequence[Kind]) -> Kind:
    """Return the kind of a result that is made of values of these kinds."""
    widest = join(kinds)
    if widest is Kind.KEPT and not all(k.yields or k in (Kind.OTHER, Kind.KEPT) for k in kinds):
        # Only the value that the user has named is kept, not everything that it meets.
        return Kind.WIDE
    if widest is Kind.STORED:
        return Kind.LOW
    return Kind.SOFT if widest.yields else widest


def _contraction(
    node: Node,
    graph: Graph,
    kinds: Sequence[Kind],
    settings: Settings,
    rule: Rule,
    make: Callable[..., Decision],
    chosen: str,
    given: PrecisionRule | None,
) -> Decision:
    avals = [graph.aval(operand) for operand in node.ins[:2]]
    ours = [is_subject(aval, settings.compute) for aval in avals]
    # Data in the compute dtype may meet weights in float32.
    low = [getattr(aval, "dtype", None) == settings.compute for aval in avals]
    lowers = any(ours) and all(one or other for one, other in zip(ours, low, strict=True))
    if rule in (Rule.WIDEST, Rule.FOLLOW):
        rule = Rule.COMPUTE if _met(kinds) is Kind.LOW else Rule.FLOAT32
    # A product with `precision=` keeps the precision that the user has chosen.
    asks = _asks_for_precision(node) or Kind.KEPT in kinds[:2]
    if rule in (Rule.FLOAT32, Rule.AS_TRACED) or not lowers or asks:
        return make(Rule.AS_TRACED, FLOAT32, Kind.WIDE, barrier=True)
    picking = None if chosen else picking_factor(node, graph)
    is_wide = picking is not None and kinds[1 - picking] is Kind.WIDE
    rounds = functools.partial(_is_plain_product, graph=graph, settings=settings)
    if is_wide and not is_rounded_by_readers(node, graph, rounds):
        return make(Rule.FOLLOW, FLOAT32, Kind.WIDE, barrier=True)
    wide = rule is Rule.ACCUMULATE or settings.accumulate
    out = Kind.WIDE if wide else Kind.LOW
    decision = make(Rule.COMPUTE, settings.compute, out, barrier=True)
    if not settings.recipes:
        return decision
    recipe = settings.recipe if given is None else given.recipe
    if recipe is None:
        return dataclasses.replace(decision, refusal=NO_RECIPE)
    decision = dataclasses.replace(decision, recipe=recipe)
    if picking is not None:
        return dataclasses.replace(decision, refusal=PICKS)
    # An `accumulate` rule is about the result's dtype only, so it does not exclude the recipe.
    by = "" if rule is Rule.ACCUMULATE else chosen
    site = site_of(
        node,
        graph,
        kinds,
        recipe,
        by=by,
        has_state=settings.has_state,
        compute=settings.compute,
        out=FLOAT32 if wide else settings.compute,
        weight_gradient=settings.reduce or settings.compute,
    )
    if isinstance(site, str):
        return dataclasses.replace(decision, refusal=site)
    return dataclasses.replace(decision, site=site)


def _decision(
    outs: Sequence[AbstractValue],
    compute: np.dtype,
    rule: Rule,
    dtype: np.dtype,
    kind: Kind,
    *,
    barrier: bool,
    known: bool,
    by: str,
) -> Decision:
    kinds = tuple(kind if is_subject(aval, compute) else Kind.OTHER for aval in outs)
    return Decision(rule, dtype, kinds, barrier, known, by=by)


# The user's rules.


def _chosen(node: Node, graph: Graph, settings: Settings) -> PrecisionRule | None:
    """Return the user's first rule that matches an operation."""
    if KEEP_SCOPE in node.scope:
        return _KEEP
    if not settings.rules:
        return None
    operation = operation_of(node, graph)
    for rule in settings.rules:
        # These outcomes are about contractions only, and readings are about loops: `read_carries`.
        narrow = rule.outcome == "accumulate" or rule.recipe is not None
        concerned = not rule.is_reading and (not narrow or node.name in CONTRACTIONS)
        if concerned and rule.matches(operation):
            return rule
    return None


def operation_of(node: Node, graph: Graph) -> Operation:
    """Return an operation as the user's rules see it."""
    shapes = [
        [jax.ShapeDtypeStruct(getattr(a, "shape", ()), getattr(a, "dtype", bool)) for a in avals]
        for avals in (map(graph.aval, node.ins), map(graph.aval, node.outs))
    ]
    function = node.structure.name if isinstance(node.structure, Scan | While) else ""
    ins, outs = map(tuple, shapes)
    return Operation(node.name, node.scope, node.params, ins, outs, function)


def read_carries(
    node: Node, graph: Graph, settings: Settings, around: StatePath
) -> tuple[Carry, ...]:
    """Return how the carries of a loop are read whose precision autocast chooses."""
    if not isinstance(node.structure, Scan | While) or settings.compute.itemsize >= 4:
        return ()
    body, inner = node.structure.inner()[-1], node.graphs[-1]
    found = [
        carry
        for carry in carries_of(node, around)
        if is_subject(inner.avals[inner.inputs[body.carried[carry.number]]], settings.compute)
    ]
    readings = [rule for rule in settings.rules if rule.is_reading]
    if not (found and readings):
        return tuple(found)
    operation = operation_of(node, graph)
    rule = next((rule for rule in readings if rule.matches(operation)), None)
    if rule is None:
        return tuple(found)
    reading: Reading = "state" if rule.outcome == "state" else "activation"
    why = f"rule {rule}"
    return tuple(Carry(carry.number, carry.name, reading, why, str(rule)) for carry in found)


def _outcome(node: Node, chosen: PrecisionRule | None) -> Rule | None:
    """Return the outcome of the user's rule for an operation; `None` if the table decides."""
    if chosen is None:
        return None
    if isinstance(chosen.outcome, str):
        outcome = Rule(chosen.outcome.replace("_", " "))
        if node.name not in _PLANNERS or outcome in (Rule.FLOAT32, Rule.AS_TRACED):
            return outcome
    if chosen.op is not None and chosen.op == node.name:
        raise ValueError(
            f"the rule {str(chosen)!r} is for `{node.name}`, which is a call or a loop: it can run "
            "as written (float32 or as_traced); for what is inside, name those operations, or a "
            "scope."
        )
    return None


def _by_function(
    node: Node,
    graph: Graph,
    kinds: Sequence[Kind],
    settings: Settings,
    function: PrecisionFunction,
    by: str,
) -> Decision:
    """Decide by a function of the user's, which is called on the operands' types."""
    compute = settings.compute
    operands = []
    for operand, kind in zip(node.ins, kinds, strict=True):
        aval = graph.aval(operand)
        dtype = held_dtype(aval, kind, compute) or aval.dtype
        operands.append(jax.ShapeDtypeStruct(aval.shape, dtype))
    # The function is called on shapes. The dtypes of its results say which kinds come out, and
    # nothing is computed while a plan is made.
    outs = jax.eval_shape(
        lambda *values: bind_by(function, node, graph, compute, values), *operands
    )
    made = []
    for number, out in zip(node.outs, outs, strict=True):
        if not is_subject(graph.avals[number], compute):
            made.append(Kind.OTHER)
        else:
            made.append(Kind.LOW if out.dtype == compute else Kind.WIDE)
    barrier = node.effects or node.name in CONTRACTIONS or node.name in COLLECTIVES
    return Decision(Rule.AS_TRACED, FLOAT32, tuple(made), barrier, by=by, function=function)


def bind_by(
    function: PrecisionFunction, node: Node, graph: Graph, compute: np.dtype, values: Sequence[Any]
) -> Sequence[Any]:
    """Run an operation with the operands and parameters that a user's function returns."""
    original = [graph.aval(operand).dtype for operand in node.ins]
    operands, params = function(compute, original, *values, **node.params)
    results = node.primitive.bind(*operands, **params)
    return results if node.primitive.multiple_results else [results]


# The table, and the exceptions that it cannot express.


def _special(node: Node, graph: Graph, rule: Rule) -> Rule:
    # `x / 8` rounds once, as a multiplication does. So the scale of attention belongs to the
    # product before it. In float32 it would begin the island of the softmax one operation early:
    # XLA:TPU then writes `x - max(x)` to memory in float32, in both passes, and the step of a small
    # ViT on a v5e takes 1174 MiB instead of 812.
    if node.name == "div" and is_scalar_literal(node.ins[1]):
        return Rule.WIDEST
    # `x * x` is a square, however it is written: float16 overflows from 256 on, and sums of squares
    # (norms, variances) are where precision is lost.
    if node.name == "mul" and node.ins[0] == node.ins[1] and isinstance(node.ins[0], int):
        return Rule.FLOAT32
    if node.name == "sub" and any(_is_spread(node, graph, operand) for operand in node.ins):
        # `x - max(x)` is the argument of an exponential, and is as exact as the exponential.
        return Rule.FLOAT32
    if node.name == "convert_element_type":
        dtypes = {graph.aval(node.ins[0]).dtype, graph.avals[node.outs[0]].dtype}
        # From float32 to float32, only JAX's weak type changes.
        return Rule.FOLLOW if dtypes == {FLOAT32} else Rule.AS_TRACED
    if node.name == "scatter" and any(inner.eqns for inner in jaxprs_in(node.params)):
        # `x.at[i].apply(f)`: f is a float32 function that is part of the operation.
        return Rule.FLOAT32
    return rule


def _is_spread(node: Node, graph: Graph, operand: Operand) -> bool:
    """Return whether many elements of the result share an operand's element, such as a maximum."""
    made_by = graph.maker(operand)
    if made_by is not None and graph.nodes[made_by].name == "broadcast_in_dim":
        operand = graph.nodes[made_by].ins[0]
    own = size(graph.aval(operand))
    return isinstance(operand, int) and own < size(graph.avals[node.outs[0]])


def _is_plain_product(node: Node, graph: Graph, settings: Settings) -> bool:
    """Return whether an operation is a product for which the user has asked for nothing."""
    is_product = node.name in CONTRACTIONS and not _asks_for_precision(node)
    chosen = _chosen(node, graph, settings)
    return is_product and (chosen is None or chosen.recipe is not None)


def _asks_for_precision(node: Node) -> bool:
    precision = node.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    # DEFAULT, whose value is 0, means that the user has not asked.
    return any(p is not None and getattr(p, "value", p) not in (0, "DEFAULT") for p in asked)


def _made_as_traced(node: Node, graph: Graph, kinds: Sequence[Kind]) -> Kind:
    if node.name == "convert_element_type":
        # The conversion of a mask, or of a parameter that is stored in 16 bits, yields.
        yields = graph.aval(node.ins[0]).dtype == np.dtype(bool) or kinds[0] is Kind.PARAM
        return Kind.SOFT if yields else Kind.WIDE
    return Kind.SOFT if node.name in ("empty", "empty2") else Kind.WIDE
