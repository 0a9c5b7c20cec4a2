"""Find backward rules that are not linear, and so see the scale of the loss.

A loss scale multiplies every cotangent by one number, and gradients are divided by this number in
the end. JAX's own derivatives are linear, so the scale changes nothing. A `custom_vjp` may clip its
cotangent, compare it or divide by its norm: it is given numbers that are 32,768 times too large.
The backward pass is traced, and all values that depend on the loss's cotangent are followed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from halfstep._autocast import CONTRACTIONS
from halfstep._base import FlatCall
from halfstep._explain.findings import ExplainFinding
from halfstep._explain.stored import vjp_by_parameters
from halfstep._program import Finder, Source, structure_of

# Operations in neither list are not reported: they move values or add them up.
_NOT_LINEAR = frozenset(
    {
        *("max", "min", "clamp", "abs", "sign", "eq", "ne", "lt", "le", "gt", "ge", "is_finite"),
        *("reduce_max", "reduce_min", "cummax", "cummin", "argmax", "argmin", "sort", "top_k"),
        *("sqrt", "rsqrt", "cbrt", "integer_pow", "square", "pow", "exp", "exp2", "expm1", "log"),
        *("log1p", "log2", "tanh", "logistic", "erf", "sin", "cos", "tan", "round", "floor"),
        *("ceil", "nextafter", "rem", "atan2", "reduce_prod", "cumprod"),
    }
)
# Linear in one factor, but not in two.
_PRODUCTS = CONTRACTIONS | {"mul"}


def scale_sensitive(
    call: FlatCall, params: Sequence[int], finder: Finder
) -> Iterator[ExplainFinding]:
    """Report operations of the backward pass that a scaled loss changes.

    A function without a backward pass, such as a `while_loop`, has none.

    Args:
        call: The function as it is written.
        params: The positions of the arguments that it is differentiated with respect to.
        finder: Finds the user's lines.
    """
    try:
        jaxpr, count = _backward(call, params)
    except Exception:  # Any error of the user's derivative rules ends up here.
        return
    found: dict[Source, core.JaxprEqn] = {}
    _follow(jaxpr, [number < count for number in range(len(jaxpr.invars))], found, finder)
    for source, equation in found.items():
        aval: Any = equation.invars[0].aval
        yield ExplainFinding(
            "loss scale",
            source,
            str(equation.source_info.name_stack),
            f"`{equation.primitive.name}` of a cotangent is not linear: with a loss scale it is "
            "given other numbers",
            "Float16 needs a loss scale, and gradients would depend on it.",
            "clip gradients after they are unscaled, in the optimizer; use bf16, which needs no "
            "loss scale; or give the rule the scale.",
            aval.size * aval.dtype.itemsize,
        )


def _backward(call: FlatCall, params: Sequence[int]) -> tuple[core.Jaxpr, int]:
    """Return the backward pass of a function, and how many of its first inputs are cotangents."""

    def results(*values: Any) -> list[Any]:
        return [leaf for leaf in call(*values) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def backward(cotangents: list[jax.Array], values: Sequence[jax.Array]) -> Any:
        return vjp_by_parameters(results, call, params, values)(cotangents)

    cotangents = jax.eval_shape(results, *call.arrays)
    return jax.make_jaxpr(backward)(cotangents, call.arrays).jaxpr, len(cotangents)


def _follow(
    jaxpr: core.Jaxpr, scaled: Sequence[bool], found: dict[Source, core.JaxprEqn], finder: Finder
) -> list[bool]:
    """Return which results scale with a function's inputs; note operations that are not linear."""
    known = {var for var, is_scaled in zip(jaxpr.invars, scaled, strict=True) if is_scaled}

    def is_scaled(atom: core.Var | core.Literal) -> bool:
        return not isinstance(atom, core.Literal) and atom in known

    for equation in jaxpr.eqns:
        ins = [is_scaled(atom) for atom in equation.invars]
        if not any(ins):
            continue
        # After an operation that is not linear, results still count as scaled: values made of them
        # depend on the scale as well.
        outs = _inside(equation, ins, found, finder)
        if outs is None:
            outs = [True] * len(equation.outvars)
            if _is_not_linear(equation.primitive.name, ins):
                found.setdefault(finder.find(equation.source_info.traceback), equation)
        known.update(var for var, is_one in zip(equation.outvars, outs, strict=True) if is_one)
    return [is_scaled(atom) for atom in jaxpr.outvars]


def _is_not_linear(name: str, ins: Sequence[bool]) -> bool:
    if name in _PRODUCTS:
        return all(ins[:2])
    # Dividing by a cotangent is not linear; dividing a cotangent is.
    return name in _NOT_LINEAR or (name == "div" and ins[1])


def _inside(
    equation: core.JaxprEqn,
    ins: Sequence[bool],
    found: dict[Source, core.JaxprEqn],
    finder: Finder,
) -> list[bool] | None:
    """Do the same for an operation that contains functions; `None` if it does not."""
    structure = structure_of(equation.primitive.name, equation.params)
    if structure is None or structure.is_opaque:
        return None
    results = [False] * len(equation.outvars)
    for inner in structure.inner():
        if inner.operands is None:
            return None
        given = [ins[position] for position in inner.operands]
        while True:
            outs = _follow(inner.function.jaxpr, given, found, finder)
            # The next iteration is given what this one makes of scaled numbers.
            carried = [
                position
                for position, is_one in zip(inner.carried, outs, strict=False)
                if is_one and not given[position]
            ]
            if not carried:
                break
            for position in carried:
                given[position] = True
        if not inner.is_test:
            pairs = zip(results, outs, strict=True)
            results = [either or other for either, other in pairs]
    return results
