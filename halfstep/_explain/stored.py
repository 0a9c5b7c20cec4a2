"""Find what a function stores for its backward pass."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from halfstep._base import NAME as SETTLE, FlatCall
from halfstep._explain.entries import Typed, typed
from halfstep._program import Finder, Inner, Jit, Remat, Scan, ShardMap, Source, structure_of

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
    func: Callable[..., list[Any]], call: FlatCall, params: Sequence[int], finder: Finder
) -> list[Residual]:
    """Return what differentiating with respect to parameters stores, except the arguments.

    An argument that is handed on as it is costs nothing more.

    Args:
        func: Takes the call's arrays: the call itself, or the call as `autocast` rewrites it.
        call: Names the argument that each array belongs to.
        params: The positions of the arguments that it is differentiated with respect to.
        finder: Finds the user's lines.
    """

    def stored(*values: Any) -> Any:
        return vjp_by_parameters(func, call, params, values)

    # `jax.vjp` returns its backward pass as a pytree whose leaves are the residuals, so a traced
    # function that returns the backward pass returns the residuals.
    jaxpr = jax.make_jaxpr(stored)(*call.arrays).jaxpr
    # The same value may be needed by several operations, and is stored once.
    found = dict.fromkeys(var for var in jaxpr.outvars if not isinstance(var, core.Literal))
    function = _Function(jaxpr)
    # A value that no operation makes is an argument.
    return [_residual(var, function, finder) for var in found if var in function.made]


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
    moving = [
        position
        for position, (value, owner) in enumerate(zip(call.arrays, call.owners, strict=True))
        if owner in params and jnp.issubdtype(value.dtype, jnp.inexact)
    ]

    def of_moving(*moved: Any) -> list[Any]:
        changed = list(values)
        for position, value in zip(moving, moved, strict=True):
            changed[position] = value
        return func(*changed)

    return jax.vjp(of_moving, *(values[position] for position in moving))[1]


def _residual(var: core.Var, function: "_Function", finder: Finder) -> Residual:
    equation = function.origin(var)
    return Residual(
        typed(var.aval),
        equation.primitive.name,
        finder.find(equation.source_info.traceback),
        str(equation.source_info.name_stack),
        isinstance(seen := function.viewed(var), int),
        isinstance(seen, core.Literal),
        str(equation.params.get("name", "")) if equation.primitive.name == "name" else "",
    )


class _Function:
    """A traced function that can tell where its values come from."""

    def __init__(self, jaxpr: core.Jaxpr):
        self.jaxpr = jaxpr
        self.made = {var: equation for equation in jaxpr.eqns for var in equation.outvars}

    def origin(self, var: core.Var) -> core.JaxprEqn:
        """Return the operation that makes a value, inside the calls and loops that return it."""
        found = self._inside(var)
        if found is None:
            return self._moved(self.made[var])
        inner, wanted = found
        if isinstance(wanted, core.Literal) or wanted not in inner.made:
            return self.made[var]
        return inner.origin(wanted)

    def _moved(self, equation: core.JaxprEqn) -> core.JaxprEqn:
        """Return what made a value that the operation only moves to the host, or only rounds.

        `jax.checkpoint` rounds a value that it saves by name to the value's own dtype.
        """
        (var, *_) = equation.invars
        maker = self.made.get(var) if isinstance(var, core.Var) else None
        if maker is None:
            return equation
        is_named = equation.primitive.name == "reduce_precision" and maker.primitive.name == "name"
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
                call = _called(equation)
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
        call = _called(equation)
        if call is None:
            return None
        outs = call.function.jaxpr.outvars
        if len(outs) != len(equation.outvars):
            return None
        return _Function(call.function.jaxpr), outs[equation.outvars.index(var)]


def _called(equation: core.JaxprEqn) -> Inner | None:
    """Return the function of a call or loop with the same results, in the same order."""
    found = structure_of(equation.primitive.name, equation.params)
    return found.inner()[0] if isinstance(found, Jit | Remat | Scan | ShardMap) else None
