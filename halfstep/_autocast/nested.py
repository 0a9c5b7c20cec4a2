"""Plan and run operations that contain functions: loops, branches and calls.

A carry has one dtype in all iterations of a loop, and a result has one dtype in all branches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from halfstep._autocast.choice import has_products, without_layers
from halfstep._autocast.kinds import Kind, carried, join
from halfstep._autocast.plans import (
    FLOAT32,
    Around,
    Decision,
    Passed,
    Plan,
    Settings,
    held_dtype,
    inner_plans,
    out_kinds,
)
from halfstep._autocast.primitives import Rule
from halfstep._autocast.state import LONG, StatePath
from halfstep._autocast.stored.names import only_stores
from halfstep._autocast.stored.saves import Again, Saves
from halfstep._base import cast
from halfstep._program import (
    Cond,
    Constant,
    Graph,
    Inside,
    Jit,
    Node,
    Remat,
    Scan,
    ShardMap,
    While,
    run_inside,
)

Planner = Callable[..., Plan]
"""Plans the functions inside an operation."""
Runner = Callable[..., list[Any]]
"""Runs the functions inside an operation."""


class Call(NamedTuple):
    """An operation that contains functions, as it is run."""

    node: Node
    decision: Decision
    operands: Sequence[Any]
    settings: Settings
    run: Runner
    slots: Any
    """The recipe's state for the products inside."""


def inner_decision(outs: Sequence[Kind], inner: object, *, barrier: bool = True) -> Decision:
    """Return the decision for an operation that contains functions, whose plans have decided."""
    return Decision(Rule.FOLLOW, FLOAT32, tuple(outs), barrier, True, inner)


def with_own_rules(settings: Settings) -> Settings:
    """Return settings for functions that have their own derivative or batching rules."""
    # JAX never differentiates a function that has its own derivative rules, and those rules choose
    # the residuals. A policy of the user's `jax.checkpoint` around them still decides.
    saves = settings.saves
    if saves.again is not Again.NOTHING:
        saves = Saves(again=Again.NOTHING)
    return dataclasses.replace(without_state(settings), rounds=False, saves=saves)


def without_state(settings: Settings) -> Settings:
    """Return settings for functions that a recipe's state does not reach."""
    # State has an axis for the iterations of each loop around a product, and the observations of a
    # product come back as the gradient of its state. A `while` has no number of iterations and no
    # reverse derivative; in a `shard_map` the state would need specs that the user has not given.
    return dataclasses.replace(settings, has_state=False)


# Scan.


def _plan_scan(
    node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner, around: Around
) -> Decision:
    loop = node.structured(Scan)
    (inner,), (path,) = node.graphs, around.paths(node)
    if settings.saves.again is Again.TWICE:
        settings = dataclasses.replace(settings, saves=Saves(again=Again.NOTHING))
    if not has_products(node):
        # Nothing in it is worth storing but what islands read.
        settings = without_layers(settings)
    first, carries = loop.consts, loop.carries
    # A carry has one dtype in all iterations. This dtype depends on what the body makes of the
    # carry, which depends on the dtype that the carry comes in with. So the body is planned until
    # carries leave it as they entered it. `carried` only ever widens a kind, and there are few
    # kinds: this ends after as many rounds as a carry has kinds to pass through, most often two.
    current = list(kinds)
    for carry in around.carries:
        if carry.is_state:
            current[first + carry.number] = join((Kind.WIDE, current[first + carry.number]))
    while True:
        made = plan(inner, current, settings, path=path)
        outs = out_kinds(made)
        stable = [
            carried(before, after)
            for before, after in zip(current[first : first + carries], outs, strict=False)
        ]
        if stable == current[first : first + carries]:
            is_most = made.settings.saves.again is Again.MOST
            if is_most and settings.compute != np.dtype(np.float16):
                wide = (n for n, kind in enumerate(stable, first) if kind is Kind.WIDE)
                stacked = frozenset(inner.inputs[number] for number in wide)
                made = dataclasses.replace(made, stacked=stacked)
            return inner_decision([*stable, *outs[carries:]], (made, tuple(current)))
        current[first : first + carries] = stable


# While.


def _plan_while(
    node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner, around: Around
) -> Decision:
    loop = node.structured(While)
    (condition, body), (_, path) = node.graphs, around.paths(node)
    settings = without_state(settings)
    of_condition, of_body, carry = map(list, loop.split(kinds))
    for found in around.carries:
        if found.is_state:
            carry[found.number] = join((Kind.WIDE, carry[found.number]))
    while True:
        made = plan(body, [*of_body, *carry], settings, path=path)
        stable = [carried(*pair) for pair in zip(carry, out_kinds(made), strict=True)]
        if stable == carry:
            test = plan(condition, [*of_condition, *carry], settings)
            return inner_decision(carry, (test, made, (*of_condition, *of_body, *carry)))
        carry = stable


# Cond and switch.


def _plan_cond(
    node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner, around: Around
) -> Decision:
    branches = [
        plan(branch, kinds[1:], settings, path=path)
        for branch, path in zip(node.graphs, around.paths(node), strict=True)
    ]
    # Which branch runs is known only on the device, and all branches return the same dtypes.
    outs = [join(kinds) for kinds in zip(*map(out_kinds, branches), strict=True)]
    return inner_decision(outs, tuple(branches))


# Calls.


def _plan_remat(
    node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner, around: Around
) -> Decision:
    remat = node.structured(Remat)
    if not settings.is_linear:
        settings = dataclasses.replace(settings, saves=_saves(remat, settings.saves))
    (graph,), (path,) = node.graphs, around.paths(node)
    entering = around.entering
    inner = _planned(plan, graph, settings, path, entering)
    # An operand that the inside reads in the compute dtype only is rounded before it is stored.
    lowered = _read_low(inner, node)
    if lowered:
        entering = tuple(
            value._replace(kind=Kind.LOW) if operand in lowered else value
            for operand, value in zip(node.ins, entering, strict=True)
        )
        inner = _planned(plan, graph, settings, path, entering)
    decision = inner_decision([value.kind for value in inner.results], inner)
    return dataclasses.replace(decision, passed=_relative(entering))


def _planned(
    plan: Planner, graph: Graph, settings: Settings, path: StatePath, entering: Sequence[Passed]
) -> Plan:
    kinds = [value.kind for value in entering]
    return plan(graph, kinds, settings, path=path, entering=entering)


def _read_low(inner: Plan, node: Node) -> set[int]:
    """Return the wide operands that all operations inside read rounded."""
    graph = inner.graph
    wide = {
        operand
        for operand, number in zip(node.ins, graph.inputs, strict=True)
        if not isinstance(operand, Constant) and inner.kinds[number] is Kind.WIDE
    }
    for operand, number in zip(node.ins, graph.inputs, strict=True):
        if isinstance(operand, Constant):
            continue
        readers = (inner.seen(number, user) for user in graph.users[number])
        if number in graph.returned or any(kind is not Kind.LOW for kind in readers):
            wide.discard(operand)
    return wide


def _relative(entering: Sequence[Passed]) -> tuple[Passed, ...]:
    """Return what is known of operands without what depends on where in the function they are.

    Layers that differ only in this share one function. Of values that are not made of anything in
    the compute dtype, such as parameters, nothing is rounded, so their depths do not matter.
    """
    least = min((value.made for value in entering if value.from_low), default=0)
    return tuple(
        value._replace(made=value.made - least, after=value.after - least)
        if value.from_low
        else value._replace(made=0, after=0)
        for value in entering
    )


def _saves(remat: Remat, saves: Saves) -> Saves:
    """Return what is stored inside a `jax.checkpoint` of the user's, and what is made again."""
    # Nothing is stored inside a function that the user recomputes, so islands would save nothing
    # and be recomputed twice. A few are worth it for another reason: see `islands`.
    if saves.is_own and remat.policy is None and not saves.rules:
        return Saves(again=Again.TWICE)
    # With `jax_remat3` JAX asks no policy about what is inside a function with a derivative of its
    # own, as many products have here: so what the policy saves gets a name.
    is_named = getattr(jax.config, "jax_remat3", False) or saves.code is not None
    if not (is_named or saves.rules or saves.policies):
        return Saves(again=Again.NOTHING)
    # With `prevent_cse=False` the user says that the function is in a loop.
    return saves.within(remat.policy, barred=remat.prevent_cse is not False)


def recomputed(node: Node, decision: Decision, run: Runner) -> Callable[..., Any]:
    """Return what the user recomputes, as a function of a recipe's state and operands."""
    remat = node.structured(Remat)
    saves = decision.inner.settings.saves
    if saves.names_values and (remat.policy is not None or saves.rules):
        remat = dataclasses.replace(remat, policy=only_stores)
    return remat.checkpoint(
        lambda slots, *values: tuple(run(decision.inner, values, decision.outs, slots=slots))
    )


def _plan_call(
    node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner, around: Around
) -> Decision:
    (graph,), (path,) = node.graphs, around.paths(node)
    inner = plan(graph, kinds, settings, path=path)
    return inner_decision(out_kinds(inner), inner)


def _plan_shard_map(
    node: Node, kinds: Sequence[Kind], settings: Settings, plan: Planner, around: Around
) -> Decision:
    return _plan_call(node, kinds, without_state(settings), plan, around)


RECOMPUTED = Remat.names
PLANNERS = MappingProxyType(
    {
        **dict.fromkeys(Scan.names, _plan_scan),
        **dict.fromkeys(While.names, _plan_while),
        **dict.fromkeys(Cond.names, _plan_cond),
        **dict.fromkeys(RECOMPUTED, _plan_remat),
        **dict.fromkeys(ShardMap.names, _plan_shard_map),
        **dict.fromkeys(Jit.names, _plan_call),
    }
)


# Loops, branches and calls all run in the same way.


class _Planned(Inside[Any, tuple[()]]):
    """The functions inside an operation, each run by its plan; they hand out nothing else."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.node)
        self.planned = call
        self.plans = body_plans(call.node, call.decision)
        self.shared = shared_low(call.node, call.decision)

    def run(
        self, number: int, values: Sequence[Any], state: PyTree
    ) -> tuple[Sequence[Any], tuple[()]]:
        outs = self.planned.decision.outs
        values = in_dtype(values, self.shared, self.planned.settings.compute)
        return self.planned.run(self.plans[number], values, outs, slots=state), ()

    def goes_on(self, values: Sequence[Any]) -> jax.Array:
        test, *_ = inner_plans(self.planned.decision.inner)
        return self.planned.run(test, values, [Kind.OTHER])[0]


def run_planned(call: Call) -> list[Any]:
    """Run a loop, a branch or a call by the plans of the functions inside."""
    operands = carried_operands(call.node, call.decision, call.operands, call.settings.compute)
    inside = _Planned(call)
    results, _ = run_inside(inside, in_dtype(operands, inside.shared, FLOAT32), call.slots)
    return results


def shared_low(node: Node, decision: Decision) -> frozenset[int]:
    """Return the activations in the compute dtype that all iterations of a long scan read whole.

    Their cotangents are sums over the iterations, in which errors add up. So the scan takes them in
    float32, and its body rounds them, which changes no value. Layers in a scan are too few for
    this, and would take more memory: XLA does not remove the casts.
    """
    if not isinstance(node.structure, Scan) or node.structure.length < LONG:
        return frozenset()
    kinds = decision.inner[-1][: node.structure.consts]
    return frozenset(position for position, kind in enumerate(kinds) if kind is Kind.LOW)


def in_dtype(values: Sequence[Any], chosen: frozenset[int], dtype: np.dtype) -> list[Any]:
    """Return values, the chosen ones in another dtype, which holds them."""
    return [
        jax.lax.convert_element_type(value, dtype) if position in chosen else value
        for position, value in enumerate(values)
    ]


def body_plans(node: Node, decision: Decision) -> list[Plan]:
    """Return the plans of the functions inside an operation, without that of a loop's test."""
    plans = list(inner_plans(decision.inner))
    return plans[1:] if isinstance(node.structure, While) else plans


def carried_operands(
    node: Node, decision: Decision, operands: Sequence[Any], compute: np.dtype
) -> Sequence[Any]:
    """Return operands in the dtypes in which all iterations of a loop take them.

    Operands of anything but a loop stay as they are.
    """
    loop, plans = node.structure, list(inner_plans(decision.inner))
    if not isinstance(loop, Scan | While):
        return operands
    tests = loop.test_consts if isinstance(loop, While) else 0
    # A loop's operands are the test's constants, and then all that the body takes.
    of_test, of_body = plans[0].graph, plans[-1].graph
    avals = [of_test.avals[number] for number in of_test.inputs[:tests]]
    avals += [of_body.avals[number] for number in of_body.inputs]
    made = []
    for value, kind, aval in zip(operands, decision.inner[-1], avals, strict=True):
        dtype = held_dtype(aval, kind, compute)
        made.append(value if dtype is None else cast(value, dtype))
    return made


RUNNERS = MappingProxyType(
    dict.fromkeys(
        (*Scan.names, *While.names, *Cond.names, *ShardMap.names, *Jit.names), run_planned
    )
)
