"""Differentiate a function once, and replay its derivative wherever the function is called.

`jax.grad` differentiates every operation of a program by itself: it traces the operation's rule,
splits the result into what is computed in the forward pass and what is linear in the tangents, and
transposes the linear part. All of this is kept here by the function. A call then only repeats the
operations that come out of it, each with its own line and scopes.

The program is the one that JAX makes without this. It is not `jit`, which would compile the
function wherever the gradient is not itself compiled, and which would give all of its operations
one line if they were inlined.
"""

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from halfstep._base import ClosedJaxpr
from halfstep._program import Excerpt, Jit, Remat, is_literal, structure_of, variables_of

Function = Callable[..., Sequence[Any]]


def differentiated_once(func: Function) -> Function:
    """Return the same function, whose derivative is traced once for each types of its arguments.

    Args:
        func: A function of arrays that returns arrays, without effects. It closes over no value of
            the trace around it, because its own traces outlive that one.
    """

    @functools.cache
    def traced(types: tuple[Any, ...]) -> Excerpt:
        function = jax.make_jaxpr(func)(*types)
        jaxpr = function.jaxpr
        return Excerpt(function, jaxpr.eqns, jaxpr.invars, jaxpr.outvars)

    @functools.cache
    def pushing(types: tuple[Any, ...], moving: tuple[int, ...]) -> _Derivative:
        def push(*values: Any) -> tuple[Any, ...]:
            primals, tangents = values[: len(types)], values[len(types) :]

            def moved(*some: Any) -> Sequence[Any]:
                given = list(primals)
                for place, value in zip(moving, some, strict=True):
                    given[place] = value
                return func(*given)

            results, made = jax.jvp(moved, [primals[place] for place in moving], list(tangents))
            return (*results, *made)

        given = [types[place].to_tangent_aval() for place in moving]
        return _Derivative(jax.make_jaxpr(push)(*types, *given), len(types))

    @jax.custom_jvp
    def outer(*values: Any) -> Sequence[Any]:
        return tuple(traced(_types(values))(values))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        moving = tuple(
            place
            for place, tangent in enumerate(tangents)
            if not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0
        )
        return pushing(_types(primals), moving)(primals, [tangents[place] for place in moving])

    outer.defjvp(rule, symbolic_zeros=True)
    return outer


def _types(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(map(jax.typeof, values))


def _is_in(atom: Any, variables: Collection[Any]) -> bool:
    """Return whether a variable is one of some variables; a literal, which has no hash, is not."""
    return not is_literal(atom) and atom in variables


def _reached(equations: Sequence[core.JaxprEqn], start: Iterable[Any]) -> set[Any]:
    """Return the variables that depend on some variables, and these."""
    found = set(start)
    for equation in equations:
        if not found.isdisjoint(variables_of(equation.invars)):
            found.update(equation.outvars)
    return found


def _is_split(equation: core.JaxprEqn, moving: set[Any]) -> bool:
    """Return whether all results of an operation are tangents, if one of them is.

    The derivative of a call may be one call that returns values and tangents. Of other operations
    that hold functions it is not known.
    """
    structure = structure_of(equation.primitive.name, equation.params)
    if structure is None or moving.isdisjoint(equation.outvars):
        return True
    if not isinstance(structure, Jit | Remat):
        return False
    jaxpr = structure.function.jaxpr
    pairs = zip(jaxpr.invars, equation.invars, strict=True)
    inside = _reached(jaxpr.eqns, [inner for inner, given in pairs if _is_in(given, moving)])
    return all(_is_in(out, inside) for out in jaxpr.outvars)


class _Derivative:
    """A function's results and tangents, given its arguments and their tangents."""

    def __init__(self, function: ClosedJaxpr, arguments: int) -> None:
        jaxpr = function.jaxpr
        self.inputs = jaxpr.invars[arguments:]
        moving = _reached(jaxpr.eqns, self.inputs)
        half = len(jaxpr.outvars) // 2
        results = jaxpr.outvars[:half]
        self.tangents = [out if _is_in(out, moving) else None for out in jaxpr.outvars[half:]]
        linear: list[core.JaxprEqn] = []
        if all(_is_split(equation, moving) for equation in jaxpr.eqns):
            linear = [eqn for eqn in jaxpr.eqns if not moving.isdisjoint(eqn.outvars)]
        made = {var for eqn in linear for var in eqn.outvars}
        pushed = dict.fromkeys(out for out in self.tangents if out in made)
        self.linear = _Linear(function, linear, set(self.inputs), tuple(pushed))
        # If the linear part is not known, all of the derivative is replayed, and JAX splits it.
        others = [out for out in self.tangents if out is not None and not linear]
        self.forward = Excerpt(
            function,
            [eqn for eqn in jaxpr.eqns if made.isdisjoint(eqn.outvars)],
            jaxpr.invars,
            [*results, *self.linear.residuals, *others],
            by="jvp",
        )
        self.others = others

    def __call__(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        made = iter(self.forward([*primals, *tangents]))
        results = [next(made) for _ in self.tangents]
        residuals = [next(made) for _ in self.linear.residuals]
        known: dict[Any, Any] = dict(zip(self.inputs, tangents, strict=True))
        given = [known[slot.variable] for slot in self.linear.slots]
        pushed = _push.bind(*residuals, *given, function=self.linear) if given else ()
        known.update(zip(self.linear.program.outputs, pushed, strict=True))
        known.update(zip(self.others, made, strict=True))
        return tuple(results), tuple(
            SymbolicZero(jax.typeof(result).to_tangent_aval()) if out is None else known[out]
            for out, result in zip(self.tangents, results, strict=True)
        )


class _Slot:
    """One reading of a tangent."""

    def __init__(self, variable: Any) -> None:
        self.variable = variable


class _Linear:
    """The part of a derivative that is linear in the tangents."""

    def __init__(
        self,
        function: ClosedJaxpr,
        equations: Sequence[core.JaxprEqn],
        tangents: Collection[Any],
        outputs: Sequence[Any],
    ) -> None:
        self.program = Excerpt(function, equations, (), outputs, by="jvp")
        live = self.program.equations
        # Each reading of a tangent has a cotangent of its own, the last reading first. They are
        # added up where the function is called, in the order in which JAX adds up the cotangents
        # of a value that many operations read: sums of floats depend on the order.
        self.slots: list[_Slot] = []
        replaced = []
        for equation in reversed(live):
            slots = [_Slot(a) if _is_in(a, tangents) else a for a in equation.invars]
            self.slots += [slot for slot in slots if isinstance(slot, _Slot)]
            replaced.append(equation.replace(invars=slots))
        self.program.equations = replaced[::-1]
        made = {var for eqn in live for var in eqn.outvars}
        read = dict.fromkeys(a for eqn in live for a in eqn.invars if not is_literal(a))
        constants = self.program.constants
        self.residuals = [
            a for a in read if a not in made and a not in tangents and a not in constants
        ]
        self.program.inputs = (*self.residuals, *self.slots)
        self.avals = [out.aval for out in outputs]
        self._transposed: dict[Hashable, tuple[Excerpt, list[int]]] = {}

    def transposed(
        self, wanted: tuple[int, ...], residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Return the cotangent of each reading of a tangent; `None` where it is zero.

        Args:
            wanted: The results that have a cotangent.
            residuals: The values from the forward pass.
            cotangents: The cotangents.
        """
        key = (wanted, _types(residuals), _types(cotangents))
        if key not in self._transposed:
            self._transposed[key] = self._transpose(wanted, residuals, cotangents)
        program, places = self._transposed[key]
        made: list[Any] = [None] * len(self.slots)
        for place, value in zip(places, program([*residuals, *cotangents]), strict=True):
            made[place] = value
        return made

    def _transpose(
        self, wanted: tuple[int, ...], residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> "tuple[Excerpt, list[int]]":
        outputs = [self.program.outputs[place] for place in wanted]
        places = [
            place
            for place, slot in enumerate(self.slots)
            if not _reached(self.program.equations, [slot]).isdisjoint(outputs)
        ]

        def backward(residuals: Any, cotangents: Any, tangents: Any) -> Any:
            def forward(*tangents: Any) -> list[Any]:
                made = self.program([*residuals, *tangents])
                return [made[place] for place in wanted]

            return jax.linear_transpose(forward, *tangents)(list(cotangents))

        types = [slot.variable.aval for slot in self.slots]
        function = jax.make_jaxpr(backward)(_types(residuals), _types(cotangents), types)
        jaxpr = function.jaxpr
        inputs = jaxpr.invars[: len(residuals) + len(cotangents)]
        made = [jaxpr.outvars[place] for place in places]
        return Excerpt(function, jaxpr.eqns, inputs, made, by="transpose"), places


class Recomputed:
    """A derivative that is computed as a whole when tangents come, or their cotangents."""

    def __init__(self, function: ClosedJaxpr, residuals: int) -> None:
        jaxpr = function.jaxpr
        self.avals = [out.aval for out in jaxpr.outvars]
        self.program = Excerpt(function, jaxpr.eqns, jaxpr.invars, jaxpr.outvars, by="jvp")
        # A residual that is not read is not kept. Behind a `stop_gradient` a tangent is not read,
        # and its maker, such as a `while` loop, may not have a derivative in reverse.
        asked = variables_of(atom for eqn in self.program.equations for atom in eqn.invars)
        asked |= variables_of(jaxpr.outvars)
        self.read = [place for place, var in enumerate(jaxpr.invars) if var in asked]
        self.residuals = [jaxpr.invars[place] for place in self.read if place < residuals]
        tangents = [jaxpr.invars[place] for place in self.read if place >= residuals]
        self.types = [tangent.aval for tangent in tangents]
        self.program.inputs = (*self.residuals, *tangents)
        # Not all of the function's: what nobody reads may read residuals that are not kept.
        equations = self.program.equations
        moving = _reached(equations, tangents)
        linear = [eqn for eqn in equations if not moving.isdisjoint(eqn.outvars)]
        known = [eqn for eqn in equations if moving.isdisjoint(eqn.outvars)]
        made = {var for eqn in known for var in eqn.outvars}
        # A result that does not depend on the tangents is zero.
        self.is_zero = [variables_of([out]).isdisjoint(moving) for out in jaxpr.outvars]
        read = variables_of(atom for eqn in linear for atom in eqn.invars)
        read |= variables_of(jaxpr.outvars)
        kept = [var for var in (*self.residuals, *made) if var in read]
        self.known = Excerpt(function, known, self.residuals, kept, by="jvp")
        self.linear = Excerpt(function, linear, [*kept, *tangents], jaxpr.outvars, by="jvp")
        self._transposed: dict[Hashable, Function] = {}

    def transposed(
        self, wanted: tuple[int, ...], residuals: Sequence[Any], cotangents: Sequence[Any]
    ) -> Sequence[Any]:
        """Return the cotangents of all tangents, as `_Linear` does."""

        def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
            # The scope by which `preflight` knows what `jax.checkpoint` recomputes.
            with jax.named_scope("rematted_computation"):
                known = self.known(residuals)

            def forward(*tangents: Any) -> list[Any]:
                made = self.linear([*known, *tangents])
                return [made[place] for place in wanted]

            return jax.linear_transpose(forward, *self.types)(list(cotangents))

        # Second derivatives do not store the inside either.
        made = self._transposed.setdefault(wanted, jax.checkpoint(backward, prevent_cse=False))
        return made(residuals, cotangents)


def pushed_as_one(push: Function) -> Function:
    """Return a function of residuals and tangents, linear in these, as one operation.

    In reverse, JAX keeps the residuals and nothing else. `jax.checkpoint` around the function would
    do the same today, but with `jax_remat3` JAX cannot transpose it.
    """

    @functools.cache
    def made(structure: Any, residuals: int, types: tuple[Any, ...]) -> Recomputed:
        def flat(*values: Any) -> Sequence[Any]:
            leaves, tangents = values[:residuals], values[residuals:]
            return push(jax.tree.unflatten(structure, leaves), tangents)

        return Recomputed(jax.make_jaxpr(flat)(*types), residuals)

    def call(residuals: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
        leaves, structure = jax.tree.flatten(residuals)
        values = [*leaves, *tangents]
        function = made(structure, len(leaves), _types(values))
        given = [values[place] for place in function.read]
        if all(function.is_zero):
            pushed: Sequence[Any] = [None] * len(function.avals)
        else:
            pushed = _push.bind(*given, function=function)
        return tuple(
            SymbolicZero(aval) if is_zero else out
            for aval, is_zero, out in zip(function.avals, function.is_zero, pushed, strict=True)
        )

    return call


_push = core.Primitive("halfstep_tangents")
_push.multiple_results = True


def _apply(*values: Any, function: _Linear | Recomputed) -> list[Any]:
    return function.program(values)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, function: _Linear | Recomputed) -> Any:
    moving = [place for place, one in enumerate(tangents) if not isinstance(one, ad.Zero)]

    def moved(*some: Any) -> list[Any]:
        given = list(primals)
        for place, value in zip(moving, some, strict=True):
            given[place] = value
        return function.program(given)

    return jax.jvp(moved, [primals[n] for n in moving], [tangents[n] for n in moving])


def _transpose(
    cotangents: Sequence[Any], *values: Any, function: _Linear | Recomputed
) -> list[Any]:
    residuals = values[: len(function.residuals)]
    wanted = tuple(n for n, one in enumerate(cotangents) if not isinstance(one, ad.Zero))
    made = function.transposed(wanted, residuals, [cotangents[n] for n in wanted])
    return [*[None] * len(residuals), *made]


def _batch(values: Sequence[Any], axes: Sequence[Any], *, function: _Linear | Recomputed) -> Any:
    made = jax.vmap(functools.partial(_apply, function=function), in_axes=tuple(axes))(*values)
    return made, [0] * len(made)


def _abstract(*_: ShapedArray, function: _Linear | Recomputed) -> list[Any]:
    return function.avals


_push.def_impl(_apply)
_push.def_abstract_eval(_abstract)
ad.primitive_jvps[_push] = _jvp
ad.primitive_transposes[_push] = _transpose
batching.primitive_batchers[_push] = _batch
mlir.register_lowering(_push, mlir.lower_fun(_apply, multiple_results=True))
