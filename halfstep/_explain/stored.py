"""Find what a function stores for its backward pass."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from halfstep._base import NAME as SETTLE, NAME_PRIMITIVE, ClosedJaxpr, FlatCall
from halfstep._explain.entries import Typed, typed
from halfstep._policy import plain_scope
from halfstep._program import (
    Excerpt,
    Finder,
    Inner,
    Jit,
    Remat,
    Scan,
    ShardMap,
    Source,
    is_literal,
    spelled,
    structure_of,
    variables_of,
)

# Operations on one operand that are linear, and whose derivative therefore stores nothing.
_LINEAR = frozenset(
    {
        *("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze", "slice"),
        *("copy", "neg", "rev", "split", "reduce_precision"),
    }
)
# Operations that make another view or another dtype of a value, and nothing new. These are fewer
# than `reasons` looks through for the name of a parameter: the result of a `gather` is memory of
# its own.
_VIEWS = frozenset(
    {
        *("convert_element_type", "transpose", "reshape", "broadcast_in_dim", "squeeze", "slice"),
        *("copy", SETTLE),
    }
)


@dataclasses.dataclass(frozen=True)
class Residual:
    """A value that is kept from the forward to the backward pass, and is not an argument."""

    type: Typed
    name: str
    """The operation that makes it."""
    source: Source
    scope: str
    of_argument: bool
    """Whether it is an argument in another dtype or shape, such as a weight that was cast."""
    is_constant: bool
    """Whether it is a number that is written into the program, in a shape."""
    label: str = ""
    """The name that it has for `jax.checkpoint`."""


def residuals(
    function: ClosedJaxpr, call: FlatCall, params: Sequence[int], finder: Finder
) -> list[Residual]:
    """Return what differentiating with respect to parameters stores, except the arguments.

    An argument that is handed on as it is costs nothing more.

    Args:
        function: Takes the call's arrays: the call itself, or the call as `autocast` rewrites it.
        call: Names the argument that each array belongs to.
        params: The positions of the arguments that it is differentiated with respect to.
        finder: Finds the user's lines.
    """
    moving = _moving(call, params)

    # `jax.vjp` returns its backward pass as a pytree whose leaves are the residuals, so a traced
    # function that returns the backward pass returns the residuals.
    jaxpr = jax.make_jaxpr(functools.partial(_backward, function, moving))(*call.arrays).jaxpr
    # The same value may be needed by several operations, and is stored once.
    found = dict.fromkeys(var for var in jaxpr.outvars if not isinstance(var, core.Literal))
    traced = _Function(jaxpr)
    # A value that no operation makes is an argument.
    return [_residual(var, traced, finder) for var in found if var in traced.made]


def _moving(call: FlatCall, params: Sequence[int]) -> list[int]:
    """Return the positions of the arrays that a call is differentiated with respect to."""
    return [
        position
        for position, (value, owner) in enumerate(zip(call.arrays, call.owners, strict=True))
        if owner in params and jnp.issubdtype(value.dtype, jnp.inexact)
    ]


def _backward(function: ClosedJaxpr, moving: Sequence[int], *values: Any) -> Callable[..., Any]:
    """Return the backward pass of a traced function.

    JAX takes longer to differentiate an operation than for anything else here. Weights of layers
    are often slices of one array, hundreds of them. So what is only a linear view of an argument
    runs first, and the rest is differentiated with respect to these views: nothing is stored for
    the derivative of the views.
    """
    jaxpr = function.jaxpr
    views = dict.fromkeys(jaxpr.invars[position] for position in moving)
    first, rest = [], []
    for equation in jaxpr.eqns:
        is_view = equation.primitive.name in _LINEAR and len(equation.invars) == 1
        if is_view and _is_in(equation.invars[0], views) and _are_inexact(equation.outvars):
            views.update(dict.fromkeys(equation.outvars))
            first.append(equation)
        else:
            rest.append(equation)
    read = variables_of(jaxpr.outvars).union(*(variables_of(eqn.invars) for eqn in rest))
    wanted = [view for view in views if view in read]
    viewed = Excerpt(function, first, jaxpr.invars, wanted)(values)
    known = [var for var in jaxpr.invars if var not in views]
    given = [value for var, value in zip(jaxpr.invars, values, strict=True) if var not in views]
    program = Excerpt(function, rest, [*wanted, *known], jaxpr.outvars)
    return jax.vjp(lambda *moved: program([*moved, *given]), *viewed)[1]


def _is_in(atom: Any, variables: Collection[Any]) -> bool:
    return not is_literal(atom) and atom in variables


def _are_inexact(variables: Sequence[core.Var]) -> bool:
    dtypes = [getattr(var.aval, "dtype", None) for var in variables]
    return all(dtype is not None and jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def vjp_by_parameters(
    func: Callable[..., list[Any]], call: FlatCall, params: Sequence[int], values: Sequence[Any]
) -> Callable[..., Any]:
    """Return the backward pass of a function with respect to some of a call's arguments.

    Args:
        func: Takes the call's arrays.
        call: Names the argument that each array belongs to.
        params: The positions of the arguments that it is differentiated with respect to.
        values: The arrays.
    """
    moving = _moving(call, params)

    def of_moving(*moved: Any) -> list[Any]:
        changed = list(values)
        for position, value in zip(moving, moved, strict=True):
            changed[position] = value
        return func(*changed)

    return jax.vjp(of_moving, *(values[position] for position in moving))[1]


def _residual(var: core.Var, function: "_Function", finder: Finder) -> Residual:
    equation, scope = function.origin(var)
    primitive, params = spelled(equation)
    return Residual(
        typed(var.aval),
        primitive.name,
        finder.find(equation.source_info.traceback),
        scope,
        isinstance(seen := function.viewed(var), int),
        isinstance(seen, core.Literal),
        str(params.get("name", "")) if primitive is NAME_PRIMITIVE else "",
    )


class _Function:
    """A traced function that can tell where its values come from."""

    def __init__(self, jaxpr: core.Jaxpr, known: "dict[int, _Function] | None" = None):
        self.jaxpr = jaxpr
        self.made = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
        # The program keeps alive what is known here by its `id`.
        self._known = {} if known is None else known
        """The functions inside, which layers share."""
        self._calls: dict[int, Inner | None] = {}

    def origin(self, var: core.Var) -> tuple[core.JaxprEqn, str]:
        """Return the operation that makes a value, inside the calls and loops that return it.

        Returns:
            The operation, and the scopes that it and the calls around it are in.
        """
        found, made = self._inside(var), self.made[var]
        if found is None:
            made = self._moved(made)
        elif not isinstance(found[1], core.Literal) and found[1] in found[0].made:
            inner, scope = found[0].origin(found[1])
            # The scopes of a called function begin anew; those in a loop's body do, too, and are
            # shown as they are there.
            is_call = made.primitive.name in Jit.names
            outer = plain_scope(str(made.source_info.name_stack)) if is_call else ""
            return inner, "/".join(part for part in (outer, scope) if part)
        return made, plain_scope(str(made.source_info.name_stack))

    def _moved(self, equation: core.JaxprEqn) -> core.JaxprEqn:
        """Return what made a value that the operation only moves to the host, or only rounds.

        `jax.checkpoint` rounds a value that it saves by name to the value's own dtype.
        """
        (var, *_) = equation.invars
        maker = self.made.get(var) if isinstance(var, core.Var) else None
        if maker is None:
            return equation
        is_named = (
            equation.primitive.name == "reduce_precision" and spelled(maker)[0] is NAME_PRIMITIVE
        )
        return maker if is_named or equation.primitive.name == "device_put" else equation

    def viewed(self, var: core.Var | core.Literal) -> "int | core.Literal | None":
        """Return the number of the argument that a value is, in whatever dtype and shape.

        Or return the constant that the value is; `None` if it is neither.
        """
        while not isinstance(var, core.Literal) and var in self.made:
            equation = self.made[var]
            inside = self._inside(var)
            if inside is not None:
                inner, wanted = inside
                seen = inner.viewed(wanted)
                if not isinstance(seen, int):
                    return seen
                call = self._called(equation)
                if call is None or call.operands is None or seen in call.carried:
                    return None
                var = equation.invars[call.operands[seen]]
            elif equation.primitive.name in _VIEWS:
                var = equation.invars[0]
            else:
                return None
        if isinstance(var, core.Literal):
            return var
        return self.jaxpr.invars.index(var) if var in self.jaxpr.invars else None

    def _inside(self, var: core.Var) -> "tuple[_Function, core.Var | core.Literal] | None":
        """Return the inner function that returns a value, and what the value is in there."""
        equation = self.made[var]
        call = self._called(equation)
        if call is None:
            return None
        outs = call.function.jaxpr.outvars
        if len(outs) != len(equation.outvars):
            return None
        inner = call.function.jaxpr
        if id(inner) not in self._known:
            self._known[id(inner)] = _Function(inner, self._known)
        return self._known[id(inner)], outs[equation.outvars.index(var)]

    def _called(self, equation: core.JaxprEqn) -> Inner | None:
        """Return the function of a call or loop with the same results, in the same order."""
        if id(equation) not in self._calls:
            found = structure_of(equation.primitive.name, equation.params)
            is_call = isinstance(found, Jit | Remat | Scan | ShardMap)
            self._calls[id(equation)] = found.inner()[0] if is_call else None
        return self._calls[id(equation)]
