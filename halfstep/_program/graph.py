"""A traced function as a flat graph: calls inlined, every value numbered."""

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import AbstractValue, Tracer
from jax.extend import core, source_info_util

from halfstep._base import ClosedJaxpr
from halfstep._policy import plain_scope
from halfstep._program.control_flow import structure_of
from halfstep._program.structures import Jit, Structure

_S = TypeVar("_S", bound=Structure)
_USUAL_BATCH = 1024
_JAX = os.path.join(os.path.dirname(jax.__file__), "")


@dataclasses.dataclass(frozen=True)
class Constant:
    """A scalar that is written into the program."""

    value: Any
    aval: Any


Operand = int | Constant
"""The number of a value, or a constant."""


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation."""

    primitive: core.Primitive
    params: Mapping[str, Any]
    ins: tuple[Operand, ...]
    outs: tuple[int, ...]
    source: source_info_util.SourceInfo
    effects: bool
    outer: str = ""
    """The scopes that the whole function is in."""

    @property
    def name(self) -> str:
        """The name of the primitive."""
        return self.primitive.name

    def in_scope(self) -> contextlib.AbstractContextManager[Any]:
        """What runs in here has this operation's line and scopes."""
        source = self.source
        return source_info_util.user_context(
            source.traceback, name_stack=source_info_util.current_name_stack() + source.name_stack
        )

    # Read once: every pass over a program asks for it, and `explain` for each operation.
    @functools.cached_property
    def structure(self) -> Structure | None:
        """The functions that the operation holds, and how it calls them; `None` for most."""
        return structure_of(self.name, self.params)

    def structured(self, *kinds: type[_S]) -> _S:
        """The structure of an operation that is known to be of one of some kinds."""
        if not isinstance(self.structure, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            # Only what the table says is a loop is asked for its body.
            raise TypeError(f"{wanted} is needed, got the operation `{self.name}`")
        return self.structure

    @property
    def scope(self) -> str:
        """The named scopes that it is in, outermost first, with `/` between them."""
        own = str(self.source.name_stack)
        return plain_scope("/".join(part for part in (self.outer, own) if part))


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Operations in an order in which they can run."""

    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Operand, ...]
    avals: tuple[Any, ...]
    """What each value is, by its number."""

    @functools.cached_property
    def users(self) -> tuple[frozenset[int], ...]:
        """Of each value, the operations that use it."""
        found: list[set[int]] = [set() for _ in self.avals]
        for index, node in enumerate(self.nodes):
            for operand in node.ins:
                if not isinstance(operand, Constant):
                    found[operand].add(index)
        return tuple(map(frozenset, found))

    @functools.cached_property
    def returned(self) -> frozenset[int]:
        """The values that the function returns."""
        return frozenset(o for o in self.outputs if not isinstance(o, Constant))

    @functools.cached_property
    def makers(self) -> tuple[int | None, ...]:
        """Of each value, the operation that makes it."""
        found: list[int | None] = [None] * len(self.avals)
        for index, node in enumerate(self.nodes):
            for number in node.outs:
                found[number] = index
        return tuple(found)

    def maker(self, operand: Operand) -> int | None:
        """The operation that makes a value, if one of the graph does."""
        return None if isinstance(operand, Constant) else self.makers[operand]

    def aval(self, operand: Operand) -> Any:
        """Shape and dtype of an operand, as traced."""
        return operand.aval if isinstance(operand, Constant) else self.avals[operand]


def graph_of(function: ClosedJaxpr, scope: str = "") -> Graph:
    """Flatten a traced function, which is in a scope."""
    builder = _Builder(scope)
    inputs = tuple(builder.new(var.aval) for var in function.jaxpr.invars)
    outputs = builder.inline(function.jaxpr, function.consts, inputs, None)
    return Graph(
        inputs,
        tuple(builder.constants),
        _live(builder.nodes, outputs),
        tuple(outputs),
        tuple(builder.avals),
    )


def _live(nodes: Sequence[Node], outputs: Sequence[Operand]) -> tuple[Node, ...]:
    """The operations whose results are read, or that have an effect.

    JAX drops all others when it differentiates a jitted function or a loop, and so never asks for
    their derivatives or their rules for `vmap`, which some have not.
    """
    needed = {operand for operand in outputs if not isinstance(operand, Constant)}
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.effects or not needed.isdisjoint(node.outs):
            needed.update(operand for operand in node.ins if not isinstance(operand, Constant))
            kept.append(node)
    return tuple(reversed(kept))


def is_of_jax(jaxpr: core.Jaxpr) -> bool:
    """Whether a traced function is one of JAX's own."""
    name = getattr(jaxpr.debug_info, "func_filename", None)
    return name is not None and name.startswith(_JAX)


class _Builder:
    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.avals: list[Any] = []
        self.nodes: list[Node] = []
        self.constants: list[tuple[int, Any]] = []

    def new(self, aval: AbstractValue) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def inline(
        self,
        jaxpr: core.Jaxpr,
        consts: Sequence[Any],
        ins: Sequence[Operand],
        outer: source_info_util.SourceInfo | None,
        caller: source_info_util.SourceInfo | None = None,
    ) -> list[Operand]:
        # Values are numbered over all functions that are inlined. JAX's variables will not do: a
        # function that is called twice has the same ones both times.
        env: dict[Any, Operand] = dict(zip(jaxpr.invars, ins, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            number = self.new(var.aval)
            self.constants.append((number, value))
            env[var] = number

        def read(atom: core.Var | core.Literal) -> Operand:
            if isinstance(atom, core.Literal):
                return Constant(atom.val, atom.aval)
            return env[atom]

        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            source = equation.source_info
            # The scopes of an inlined function begin where it is called: without those of the call,
            # a rule for `decoder/head` would not find what a jitted layer does in there.
            if outer is not None:
                source = source.replace(name_stack=outer.name_stack + source.name_stack)
            if caller is not None:
                source = source.replace(traceback=caller.traceback)
            if (inner := _inlined(equation)) is not None:
                # JAX keeps what it has traced of its own functions: their lines are those of the
                # first call, wherever it was.
                line = source if is_of_jax(inner.jaxpr) else None
                results = self.inline(inner.jaxpr, inner.consts, operands, source, line)
                env.update(zip(equation.outvars, results, strict=True))
                continue
            outs = tuple(self.new(var.aval) for var in equation.outvars)
            env.update(zip(equation.outvars, outs, strict=True))
            self.nodes.append(
                Node(
                    equation.primitive,
                    equation.params,
                    tuple(operands),
                    outs,
                    source,
                    any(map(_orders, equation.effects)),
                    self.scope,
                )
            )
        return [read(atom) for atom in jaxpr.outvars]


def _orders(effect: object) -> bool:
    """Whether an effect must keep its place among others."""
    # To know an axis of the mesh is an effect for JAX, of collectives and of `axis_index`. It has
    # no public name, and orders nothing.
    return type(effect).__name__ != "NamedAxisEffect"


# Most calls are JAX's own (`jnp.where`, `jax.nn.relu` and the like are jitted). Were they left as
# calls, no decision about an operation could look at what comes before and after it.
def _inlined(equation: core.JaxprEqn) -> ClosedJaxpr | None:
    """The function of a call that is nothing but its inside."""
    if equation.primitive.name not in Jit.names:
        return None
    call = structure_of(equation.primitive.name, equation.params)
    # A call that says where its values lie is left as it is.
    return call.function if isinstance(call, Jit) and call.is_only_a_call else None


def size(aval: object) -> int:
    """How many elements a value has.

    A dimension that has no number yet, as `jax.export` has them, counts as if it were a usual
    batch: sizes are compared with each other, to tell a row from what it is spread over.
    """
    shape = getattr(aval, "shape", ())
    return math.prod(dim if isinstance(dim, int) else _USUAL_BATCH for dim in shape)


def is_scalar_literal(operand: Operand) -> bool:
    """Whether an operand is a number written into the program."""
    return isinstance(operand, Constant) and np.ndim(operand.value) == 0


def is_traced(value: object) -> bool:
    """Whether a value is one of an outer trace, of which only shape and dtype are known."""
    return isinstance(value, Tracer)
