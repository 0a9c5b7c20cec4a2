"""Split off what a loop would repeat: small results that depend on the loop's constants alone.

A step over microbatches encodes the same weights in each of them. The encoded weights are computed
before the loop, and every iteration reads them. Only results that are much smaller than what they
are computed from leave the loop: elements of 8 and 4 bits, and their scales. A cast to 16 bits
stays inside, since all weights in 16 bits are what nobody wants to hold during a step.

XLA moves such operations out of its loops only if this makes nothing larger, and an encoding, which
is read in several forms, does not qualify.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from halfstep._base import ClosedJaxpr
from halfstep._program.control_flow import bind_again, structure_of
from halfstep._program.excerpt import is_literal, variables_of
from halfstep._program.structures import Jit, Remat, Scan

# A result of more bytes than this share of what it is computed from stays in the loop. Elements of
# 8 bits may be half as large, because parameters may be stored in 16 bits.
_SMALL, _SMALL_OF_ELEMENTS = 1 / 4, 1 / 2
_ELEMENT_BITS = 8


@dataclasses.dataclass(frozen=True)
class _Call:
    """An operation with a function inside, and the part of that function that is split off."""

    structure: Jit | Remat | Scan
    inside: "Invariants"


class Invariants:
    """A traced function as two: one of some inputs alone, and the rest."""

    def __init__(self, function: ClosedJaxpr, sizes: Sequence[float | None] | None = None) -> None:
        """Find what depends on known inputs alone.

        Args:
            function: The function.
            sizes: For each input, how many bytes it is computed from; `None` for one that is not
                known. By default only the function's constants are known.
        """
        jaxpr = function.jaxpr
        self._function = function
        # How many bytes each known value is computed from: 0 for numbers of the program itself,
        # and for what a loop inside would compute in every iteration anew.
        self._known: dict[Any, float] = {
            var: _size(var.aval) if sizes is None else 0 for var in jaxpr.constvars
        }
        for var, size in zip(jaxpr.invars, sizes or [None] * len(jaxpr.invars), strict=True):
            if size is not None:
                self._known[var] = size
        self._calls: dict[int, _Call] = {}
        wanted: dict[Any, None] = {}
        for number, equation in enumerate(jaxpr.eqns):
            operands = variables_of(equation.invars)
            if not equation.effects and operands <= self._known.keys():
                size = max((self._known[var] for var in operands), default=0)
                for out in equation.outvars:
                    # Stacked layers are larger than each of them.
                    self._known[out] = max(size, _size(out.aval)) if size else 0
                continue
            if (call := self._split(equation)) is not None:
                self._calls[number] = call
            wanted |= dict.fromkeys(var for var in equation.invars if not is_literal(var))
        wanted |= dict.fromkeys(var for var in jaxpr.outvars if not is_literal(var))
        given = {*jaxpr.constvars, *jaxpr.invars}
        self._kept = tuple(
            var
            for var in wanted
            if var in self._known
            and var not in given
            and 0 < _bytes(var.aval) <= _share(var.aval) * self._known[var]
        )

    def __len__(self) -> int:
        """Return how many results are split off."""
        return len(self._kept) + sum(len(call.inside) for call in self._calls.values())

    def before(self, values: Sequence[Any]) -> list[Any]:
        """Compute the results that are split off, given all inputs; unknown ones are not read."""
        wanted: set[Any] = set(self._kept)
        for number in self._calls:
            wanted |= variables_of(self._function.jaxpr.eqns[number].invars)
        env = self._run(values, wanted & self._known.keys(), {}, None)
        made = [env[var] for var in self._kept]
        for number, call in self._calls.items():
            # Operands that are not known have no value here.
            made += _before(call, _read(env, self._function.jaxpr.eqns[number].invars))
        return made

    def rest(self, values: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        """Compute the function, given all inputs and the results that are split off."""
        jaxpr, found = self._function.jaxpr, iter(made)
        given = {var: next(found) for var in self._kept}
        inside = {
            number: [next(found) for _ in range(len(call.inside))]
            for number, call in self._calls.items()
        }
        env = self._run(values, variables_of(jaxpr.outvars), given, inside)
        return _read(env, jaxpr.outvars)

    def _split(self, equation: core.JaxprEqn) -> _Call | None:
        """Return the part of a call or loop that can be split off, if there is one."""
        structure = structure_of(equation.primitive.name, equation.params)
        if not isinstance(structure, Jit | Remat | Scan):
            return None
        if isinstance(structure, Jit) and not structure.is_only_a_call:
            return None
        atoms: Sequence[Any] = equation.invars
        sizes = [0 if is_literal(atom) else self._known.get(atom) for atom in atoms]
        if isinstance(structure, Scan):
            # What depends on the loop's own constants alone would be stacked, once per iteration.
            consts, carries, xs = structure.split(sizes)
            inner = [None if size is None else 0 for size in consts] + [None] * len(carries)
            inner += [None if size is None else size / structure.length for size in xs]
            inside = Invariants(structure.body, inner)
        else:
            inside = Invariants(structure.function, sizes)
        return _Call(structure, inside) if len(inside) else None

    def _run(
        self,
        values: Sequence[Any],
        wanted: set[Any],
        given: Mapping[Any, Any],
        inside: Mapping[int, Sequence[Any]] | None,
    ) -> dict[Any, Any]:
        """Run the operations that are needed for some values; return all values.

        Args:
            values: The inputs.
            wanted: The values that are needed.
            given: Values that are known already.
            inside: What was split off from each call; `None` to run no operation with an effect.
        """
        jaxpr, consts = self._function.jaxpr, self._function.consts
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        env.update(given)
        here = source_info_util.current_name_stack()
        for number in self._needed(wanted, given, effects=inside is not None):
            equation = jaxpr.eqns[number]
            source = equation.source_info
            operands = _read(env, equation.invars)
            with source_info_util.user_context(
                source.traceback, name_stack=here + source.name_stack
            ):
                if inside and number in inside:
                    results = _rest(self._calls[number], equation, operands, inside[number])
                else:
                    results = bind_again(equation.primitive, equation.params, operands)
            env.update(zip(equation.outvars, results, strict=True))
        return env

    def _needed(
        self, wanted: set[Any], given: Mapping[Any, Any], *, effects: bool
    ) -> Iterator[int]:
        """Yield the operations that make some values, or have an effect, in their order."""
        needed, found = wanted - given.keys(), list[int]()
        for number in reversed(range(len(self._function.jaxpr.eqns))):
            equation = self._function.jaxpr.eqns[number]
            if (effects and equation.effects) or not needed.isdisjoint(equation.outvars):
                needed |= variables_of(equation.invars) - given.keys()
                found.append(number)
        return reversed(found)


def _read(env: Mapping[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    """Return the values of some atoms; `None` for those that have none, as unknown operands."""
    return [atom.val if is_literal(atom) else env.get(atom) for atom in atoms]


def _share(aval: Any) -> float:
    is_element = jnp.issubdtype(aval.dtype, jnp.floating) and jnp.finfo(aval.dtype).bits <= (
        _ELEMENT_BITS
    )
    return _SMALL_OF_ELEMENTS if is_element else _SMALL


def _bytes(aval: Any) -> float:
    """Return the bytes of a value; elements of 4 bits have half a byte."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, np.number):
        return 0
    bits = (jnp.finfo if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo)(dtype).bits
    return math.prod(aval.shape) * bits / 8


def _size(aval: Any) -> float:
    """Return the bytes of a floating-point value; 0 for all others."""
    return _bytes(aval) if jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating) else 0


def _before(call: _Call, operands: Sequence[Any]) -> list[Any]:
    """Compute what a call or a loop needs of known operands; the others are `None`."""
    if not isinstance(call.structure, Scan):
        return call.inside.before(operands)
    consts, carries, xs = call.structure.split(operands)

    def iteration(nothing: tuple[()], each: Sequence[Any]) -> Any:
        return nothing, call.inside.before((*consts, *[None] * len(carries), *each))

    _, made = jax.lax.scan(iteration, (), list(xs), length=call.structure.length)
    return made


def _rest(
    call: _Call, equation: core.JaxprEqn, operands: Sequence[Any], made: Sequence[Any]
) -> Sequence[Any]:
    """Run a call or a loop with the results that were split off."""
    structure, count = call.structure, len(operands)

    def func(*values: Any) -> list[Any]:
        return call.inside.rest(values[:count], values[count:])

    if isinstance(structure, Jit):
        return jax.jit(func)(*operands, *made)
    if isinstance(structure, Remat):
        return structure.bind_as_traced(equation.primitive, func, [*operands, *made])
    consts, carries, xs = structure.split(operands)

    def iteration(carry: Sequence[Any], each: tuple[Sequence[Any], Sequence[Any]]) -> Any:
        found = call.inside.rest((*consts, *carry, *each[0]), each[1])
        return found[: len(carry)], found[len(carry) :]

    state, stacked = structure.bind(iteration, list(carries), (list(xs), list(made)))
    return [*state, *stacked]
