"""Lay out the rows of a program: which values are recorded, and in which row each one is."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal as OneOf

import jax
import jax.numpy as jnp
import numpy as np

from halfstep._base import FlatCall, lines_of_backward_functions
from halfstep.debug._instrument.body import (
    Body,
    Select,
    between_lines,
    body_of,
    every_operation,
    site_of,
)
from halfstep.debug._instrument.site import Site

Sites = OneOf["scopes", "ops"] | Callable[[Site], bool]
"""Which values are recorded: between lines and scopes, all, or those that a function selects."""

Value = tuple[Body, int]
"""A value of a program: its function, and its number there."""


# Compared by identity: a layout is static in the log, and JAX compares static fields in every call.
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """The sites of a program, in the order of their rows, which is the order of one run."""

    body: Body
    sites: tuple[Site, ...]
    owners: tuple[Value, ...]
    """For each site, its function and the number of the value in that function."""
    rows: Mapping[Body, Mapping[int, int]]
    """For each function, the row of each value that is a site."""
    loops: int
    """The maximum nesting depth of loops."""

    def __repr__(self) -> str:
        return f"<{len(self.sites)} sites>"

    def row(self, body: Body, number: int) -> int | None:
        """Return the row of a value, or `None` if the value is not recorded."""
        return self.rows[body].get(number)

    def count(self, body: Body) -> int:
        """Count the rows of a function and of all functions inside it."""
        inside = sum(self.count(inner) for bodies in body.inner.values() for inner in bodies)
        return len(self.rows[body]) + inside


@dataclasses.dataclass(frozen=True)
class InstrumentedCall:
    """A traced call with its sites and its arrays."""

    layout: Layout
    call: FlatCall
    compute: np.dtype


def instrument(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    sites: Sites,
    compute: np.dtype | None,
) -> InstrumentedCall:
    """Trace a call and select the values to record.

    Args:
        func: Any function that can be traced.
        args: Its arguments; arrays may be `jax.ShapeDtypeStruct`.
        kwargs: The same, by name.
        sites: Which values are recorded.
        compute: The dtype whose range numbers are compared with; `None` for the narrowest 16-bit
            dtype that the program has.
    """
    call = FlatCall(func, args, kwargs)
    # Otherwise all operations of a `custom_vjp`'s backward rule would get the line of the call.
    with lines_of_backward_functions():
        program = jax.make_jaxpr(call)(*call.arrays)
    body = body_of(program, call.paths, _carried(call, program.out_avals))
    return InstrumentedCall(layout_for(body, sites), call, compute or _narrowest(body))


def _carried(call: FlatCall, returned: Sequence[Any]) -> frozenset[int]:
    """Find the arrays of arguments that go from step to step: results have the same types."""

    # Matched by types, since nothing else links a result to the argument that it replaces. A batch
    # with the types of a result is then not a site, but the values computed from it are.
    def types(avals: Sequence[Any]) -> list[tuple[Any, Any]]:
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
    """Return the first of float16 and bfloat16 that a program has, else float32."""
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


def layout_for(body: Body, sites: Sites) -> Layout:
    """Lay out the rows of a program for the values that the user asks for."""
    if sites == "scopes":
        return layout_of(body, between_lines)
    if sites == "ops":
        return layout_of(body, every_operation)
    if callable(sites):
        return layout_of(body, every_operation, sites)
    raise ValueError(
        f'sites must be "scopes", "ops" or a function of a `debug.Site`, got {sites!r}'
    )


def layout_of(body: Body, select: Select, keep: Callable[[Site], bool] | None = None) -> Layout:
    """Lay out the rows of a program.

    Args:
        body: The outermost function.
        select: Which values are sites.
        keep: Which of these sites to keep; `None` for all.
    """
    # Every function gets an entry, even without sites, so that readers need no default.
    sites: list[Site] = []
    owners: list[Value] = []
    rows: dict[Body, Mapping[int, int]] = {}
    for owner in _bodies(body):
        rows[owner] = {}
    for owner, number in _in_order(body, {owner: select(owner) for owner in rows}):
        site = site_of(owner, number)
        if keep is None or keep(site):
            rows[owner] = {**rows[owner], number: len(sites)}
            sites.append(site)
            owners.append((owner, number))
    loops = max((len(owner.loops) for owner in rows), default=0)
    return Layout(body, tuple(sites), tuple(owners), MappingProxyType(rows), loops)


def _bodies(body: Body) -> Iterator[Body]:
    yield body
    for bodies in body.inner.values():
        for inner in bodies:
            yield from _bodies(inner)


def _in_order(body: Body, selected: Mapping[Body, frozenset[int]]) -> Iterator[Value]:
    """Yield values in the order in which a run computes them.

    The inputs come first; then, for each operation, the values inside it and its results. An
    interpreter appends its rows in this order, which is the only link between rows and sites.
    """
    for number in body.graph.inputs:
        if number in selected[body]:
            yield body, number
    for index, node in enumerate(body.graph.nodes):
        for inner in body.inner.get(index, ()):
            yield from _in_order(inner, selected)
        for number in node.outs:
            if number in selected[body]:
                yield body, number
