"""Flatten a traced function into a graph: inline its calls and number every value."""

import contextlib
import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeGuard, TypeVar

import jax
import numpy as np
from jax.core import AbstractValue, Tracer
from jax.extend import core, source_info_util
from jax.ref import AbstractRef

from halfstep._base import ClosedJaxpr, jaxprs_in
from halfstep._policy import plain_scope
from halfstep._program.control_flow import spelled, structure_of
from halfstep._program.products import moved_product
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

    def in_scope(
        self, entered: int = 0, end: int | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which everything that runs has this operation's line and scopes.

        Args:
            entered: How many of the scopes, beginning with the outermost, are entered already.
            end: How many of them to be in; `None` for all.
        """
        source = self.source
        scopes = source_info_util.current_name_stack() + source.name_stack[entered:end]
        return source_info_util.user_context(source.traceback, name_stack=scopes)

    # Read once: every pass over a program needs it, and `explain` needs it for each operation.
    @functools.cached_property
    def structure(self) -> Structure | None:
        """The functions that the operation holds, and how it calls them; `None` for most."""
        return structure_of(self.name, self.params)

    # Also read once: a loop's body is looked into by its own plan and by those of the loops around.
    @functools.cached_property
    def graphs(self) -> tuple["Graph", ...]:
        """The functions that the operation holds, flattened."""
        calls = () if self.structure is None else self.structure.inner()
        return tuple(graph_of(call.function, self.scope) for call in calls)

    @property
    def is_call(self) -> bool:
        """Whether it is a loop, a branch or a call, whose functions are looked into."""
        return self.structure is not None and not self.structure.is_opaque

    def structured(self, *kinds: type[_S]) -> _S:
        """Return the structure of an operation that is known to be of one of the given kinds."""
        if not isinstance(self.structure, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            # Callers ask for the body of a loop only if the table says that it is a loop.
            raise TypeError(f"{wanted} is needed, got the operation `{self.name}`")
        return self.structure

    @property
    def scope(self) -> str:
        """The named scopes that the operation is in, outermost first, with `/` between them."""
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
    """The shape and dtype of each value, by its number."""

    @functools.cached_property
    def users(self) -> tuple[frozenset[int], ...]:
        """For each value, the operations that use it."""
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
        """For each value, the operation that makes it."""
        found: list[int | None] = [None] * len(self.avals)
        for index, node in enumerate(self.nodes):
            for number in node.outs:
                found[number] = index
        return tuple(found)

    def maker(self, operand: Operand) -> int | None:
        """Return the operation that makes a value; `None` if no operation of the graph does."""
        return None if isinstance(operand, Constant) else self.makers[operand]

    def aval(self, operand: Operand) -> Any:
        """Return the shape and dtype of an operand, as traced."""
        return operand.aval if isinstance(operand, Constant) else self.avals[operand]


def graph_of(function: ClosedJaxpr, scope: str = "") -> Graph:
    """Flatten a traced function; `scope` holds the scopes that the whole function is in."""
    builder = _Builder(scope)
    inputs = tuple(builder.new(var.aval) for var in function.jaxpr.invars)
    outputs = builder.inline(function.jaxpr, function.consts, inputs, None)
    nodes = _with_moved_products(builder, _live(builder.nodes, outputs), outputs)
    return Graph(
        inputs,
        tuple(builder.constants),
        nodes,
        tuple(outputs),
        tuple(builder.avals),
    )


def _live(nodes: Sequence[Node], outputs: Sequence[Operand]) -> tuple[Node, ...]:
    """Return the operations whose results are read, or that have an effect.

    JAX drops all others when it differentiates a jitted function or a loop, and so never asks for
    their derivatives or their rules for `vmap`, which some of them do not have.
    """
    needed = {operand for operand in outputs if not isinstance(operand, Constant)}
    kept: list[Node] = []
    for node in reversed(nodes):
        if node.effects or not needed.isdisjoint(node.outs):
            needed.update(operand for operand in node.ins if not isinstance(operand, Constant))
            kept.append(node)
    return tuple(reversed(kept))


def _with_moved_products(
    builder: "_Builder", nodes: Sequence[Node], outputs: Sequence[Operand]
) -> tuple[Node, ...]:
    """Move the factors of products whose results are far larger, and moved by nothing else."""
    uses = Counter(operand for node in nodes for operand in node.ins if isinstance(operand, int))
    uses.update(operand for operand in outputs if isinstance(operand, int))
    by_operand = {node.ins[0]: node for node in nodes if node.name == "transpose"}
    made: list[Node] = []
    gone: set[Node] = set()
    for node in nodes:
        move = by_operand.get(node.outs[0]) if node.name == "dot_general" else None
        avals = [
            builder.avals[value] for value in (*node.ins, *node.outs) if isinstance(value, int)
        ]
        # A mesh with explicit axes has a say in the types of products.
        is_plain = len(avals) == 3 and all(aval.sharding.mesh.empty for aval in avals)
        moved = None
        if move is not None and is_plain and uses[node.outs[0]] == 1:
            moved = moved_product(
                node.params["dimension_numbers"],
                tuple(move.params["permutation"]),
                [aval.shape for aval in avals],
            )
        if moved is None or move is None:
            made += [] if node in gone else [node]
            continue
        gone.add(move)
        factors = list(node.ins)
        for place, permutation in enumerate(moved.moves):
            if permutation is not None:
                params: Any = {"permutation": permutation}
                number = builder.new(move.primitive.abstract_eval(avals[place], **params)[0])
                ins, outs = (node.ins[place],), (number,)
                own: Any = {"primitive": move.primitive, "params": params, "ins": ins, "outs": outs}
                made.append(dataclasses.replace(node, **own))
                factors[place] = number
        ins = tuple(factors[::-1] if moved.swaps else factors)
        params = {**node.params, "dimension_numbers": moved.numbers}
        made.append(dataclasses.replace(node, params=params, ins=ins, outs=move.outs))
    return tuple(made)


def is_of_jax(jaxpr: core.Jaxpr) -> bool:
    """Return whether a traced function is one of JAX's own."""
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
        # function that is called twice has the same variables both times.
        env: dict[Any, Operand] = dict(zip(jaxpr.invars, ins, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            number = self.new(var.aval)
            self.constants.append((number, value))
            env[var] = number

        def read(atom: core.Var | core.Literal) -> Operand:
            if isinstance(atom, core.Literal):
                return Constant(atom.val, atom.aval)
            return env[atom]

        own = scopes = None
        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            source = equation.source_info
            # The scopes of an inlined function begin at its call. Without the scopes of the call, a
            # rule for `decoder/head` would not match the operations of a jitted layer in there.
            if outer is not None:
                if scopes is None or source.name_stack is not own:
                    own = source.name_stack
                    scopes = outer.name_stack + own
                source = source.replace(name_stack=scopes)
            if caller is not None:
                source = source.replace(traceback=caller.traceback)
            if (inner := _inlined(equation)) is not None:
                # JAX caches the traces of its own functions: their lines are those of the first
                # call, wherever that call was.
                line = source if is_of_jax(inner.jaxpr) else None
                results = self.inline(inner.jaxpr, inner.consts, operands, source, line)
                env.update(zip(equation.outvars, results, strict=True))
                continue
            if (number := _number(equation, operands)) is not None:
                env[equation.outvars[0]] = number
                continue
            outs = tuple(self.new(var.aval) for var in equation.outvars)
            env.update(zip(equation.outvars, outs, strict=True))
            self.nodes.append(
                Node(
                    *spelled(equation),
                    tuple(operands),
                    outs,
                    source,
                    _has_effect(equation),
                    self.scope,
                )
            )
        return [read(atom) for atom in jaxpr.outvars]


# These round as XLA does.
_OF_NUMBERS = MappingProxyType(
    {
        **{"add": np.add, "div": np.divide, "mul": np.multiply, "sub": np.subtract},
        **{"sqrt": np.sqrt, "convert_element_type": np.positive},
    }
)


def _number(equation: core.JaxprEqn, operands: Sequence[Operand]) -> Constant | None:
    """Return the number that arithmetic on numbers of the program makes, if it is that.

    `x / jnp.sqrt(64.0)` is `x / 8` in other words, and runs as that does.
    """
    function = _OF_NUMBERS.get(equation.primitive.name)
    numbers = [operand.value for operand in operands if _is_real_number(operand)]
    if function is None or len(numbers) < len(operands):
        return None
    aval: Any = equation.outvars[0].aval
    if aval.shape or aval.dtype != np.dtype(np.float32):
        return None
    with np.errstate(all="ignore"):
        return Constant(function(*(np.asarray(one, aval.dtype) for one in numbers)), aval)


def _is_real_number(operand: Operand) -> TypeGuard[Constant]:
    return isinstance(operand, Constant) and np.asarray(operand.value).dtype.kind in "iuf"


def _has_effect(equation: core.JaxprEqn) -> bool:
    """Return whether an operation runs even if nothing reads its results, and in its place.

    So does what is given a `Ref`, which it may write to, and what holds a function with an effect,
    whether or not the operation declares the effect.
    """
    inside = (effect for inner in jaxprs_in(equation.params) for effect in inner.effects)
    takes_ref = any(isinstance(atom.aval, AbstractRef) for atom in equation.invars)
    return takes_ref or any(map(_orders, (*equation.effects, *inside)))


def _orders(effect: object) -> bool:
    """Return whether an effect must keep its place among others."""
    # JAX gives collectives and `axis_index` an effect for using an axis of the mesh. This effect
    # has no public name, and it orders nothing.
    return type(effect).__name__ != "NamedAxisEffect"


# Most calls are JAX's own (`jnp.where`, `jax.nn.relu` and the like are jitted). Were they left as
# calls, no decision about an operation could look at what comes before and after it.
def _inlined(equation: core.JaxprEqn) -> ClosedJaxpr | None:
    """Return the function of a plain call; `None` for all other operations."""
    if equation.primitive.name not in Jit.names:
        return None
    call = structure_of(equation.primitive.name, equation.params)
    # A call that specifies shardings is left as it is.
    return call.function if isinstance(call, Jit) and call.is_only_a_call else None


def size(aval: object) -> int:
    """Return the number of elements of a value.

    A symbolic dimension, such as `jax.export` makes, counts as if it were a usual batch: sizes are
    compared with each other, to tell a row from the array that it is broadcast to.
    """
    shape = getattr(aval, "shape", ())
    found = math.prod(shape)
    if isinstance(found, int):
        return found
    return math.prod(dim if isinstance(dim, int) else _USUAL_BATCH for dim in shape)


def is_scalar_literal(operand: Operand) -> bool:
    """Return whether an operand is a number written into the program."""
    return isinstance(operand, Constant) and np.ndim(operand.value) == 0


def is_traced(value: object) -> bool:
    """Return whether a value belongs to an outer trace: only its shape and dtype are known."""
    return isinstance(value, Tracer)
