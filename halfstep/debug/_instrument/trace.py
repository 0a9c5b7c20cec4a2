"""A call of a function, traced, with its sites; and compiled programs that are forgotten."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal as OneOf

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from halfstep._base import FlatCall, is_array, lines_of_backward_functions
from halfstep.debug._instrument.body import Body, between_lines, body_of, every_operation
from halfstep.debug._instrument.layout import Layout, layout_of
from halfstep.debug._instrument.site import Site

Sites = OneOf["scopes", "ops"] | Callable[[Site], bool]
"""Which values are recorded: between lines and scopes, all, or those that a function wants."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A call: its sites, and its arrays."""

    layout: Layout
    call: FlatCall
    compute: np.dtype


def trace(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    sites: Sites,
    compute: np.dtype | None,
) -> Traced:
    """Trace a call and say what is recorded of it.

    Args:
        func: Any function that can be traced.
        args: Its arguments; arrays may be `jax.ShapeDtypeStruct`.
        kwargs: The same, by name.
        sites: Which values.
        compute: The dtype whose range numbers are compared with; `None` for the narrowest of 16
            bits that the program has.
    """
    call = FlatCall(func, args, kwargs)
    with lines_of_backward_functions():
        program = jax.make_jaxpr(call)(*call.arrays)
    body = body_of(program, call.paths, _carried(call, program.out_avals))
    return Traced(layout_for(body, sites), call, compute or _narrowest(body))


def layout_for(body: Body, sites: Sites) -> Layout:
    """The rows of a program, of the values that a user asks for."""
    if sites == "scopes":
        return layout_of(body, between_lines)
    if sites == "ops":
        return layout_of(body, every_operation)
    if callable(sites):
        return layout_of(body, every_operation, sites)
    raise ValueError(
        f'sites must be "scopes", "ops" or a function of a `debug.Site`, got {sites!r}'
    )


def _carried(call: FlatCall, returned: Sequence[Any]) -> frozenset[int]:
    """The arrays of those arguments whose like is returned: what goes from step to step."""

    def types(avals: Sequence[Any]) -> list[Any]:
        return [(aval.shape, aval.dtype) for aval in avals]

    owners, results = call.dynamic(call.arguments.owners), types(returned)
    found: set[int] = set()
    for owner in set(owners):
        own = [at for at, other in enumerate(owners) if other == owner]
        wanted = types([call.arrays[at] for at in own])
        ends = range(len(wanted), len(results) + 1)
        if any(results[end - len(wanted) : end] == wanted for end in ends):
            found.update(own)
    return frozenset(found)


def _narrowest(body: Body) -> np.dtype:
    """float16 if a program has it, else bfloat16 if it has that, else float32."""
    found = _dtypes(body)
    for dtype in (jnp.float16, jnp.bfloat16):
        if np.dtype(dtype) in found:
            return np.dtype(dtype)
    return np.dtype(np.float32)


def _dtypes(body: Body) -> set[Any]:
    found = {getattr(aval, "dtype", None) for aval in body.graph.avals}
    for bodies in body.inner.values():
        found.update(*map(_dtypes, bodies))
    return found


class Compiled:
    """A function that is compiled such that every operation is rounded as it is written.

    Where XLA may keep more bits than a dtype has, as on CPUs, what overflows elsewhere does not
    overflow there. The program goes when this object goes: a search compiles hundreds, and
    Equinox's `filter_jit` keeps all that it ever compiled.
    """

    def __init__(self, func: Callable[..., Any]):
        self._func = func
        self._static: Any = None
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The arrays of what the function returns."""
        arrays, static = eqx.partition((args, kwargs), is_array)
        if self._run is None or not eqx.tree_equal(static, self._static):
            func = self._func

            def run(arrays: Any) -> Any:
                args, kwargs = eqx.combine(arrays, static)
                return eqx.filter(func(*args, **kwargs), eqx.is_array)

            options: Any = {"xla_allow_excess_precision": False}
            self._static, self._run = static, jax.jit(run, compiler_options=options)
        return self._run(arrays)
