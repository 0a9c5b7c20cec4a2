"""A second implementation of traced programs: NumPy in float64, with roundings as one pleases.

The same program is evaluated in three ways. *Without rounding*, casts to narrow formats change
nothing, so that a program and the same program under `autocast` must agree to about 1e-12, forward
and backward: what is left of `autocast` when roundings are taken away is the identity. With each
result *moved by 1e-13*, it shows how much of a difference is the program's own sensitivity. And
with each result *rounded at random* to one of the two nearest numbers of its dtype, several times,
it shows how far roundings alone can move a result.

Operations without a rule here are bound once more, in float64: they are JAX's own, which is not
what is tested.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from halfstep._base.jaxprs import ClosedJaxpr, jaxprs_in
from halfstep._program import structures
from halfstep._program.control_flow import bind_again, structure_of
from tests.fuzz._numpy import EXACT_MOVES, RULES
from tests.fuzz._program import is_key, is_key_dtype

Round = Callable[[np.ndarray, np.dtype, int], np.ndarray]
"""What becomes of a result, given its declared dtype and how many terms were added."""
_NARROW = (np.dtype(jnp.bfloat16), np.dtype(np.float16))
_OWN = ("halfstep_contraction", "halfstep_difference", "halfstep_linear", "halfstep_tangents")
_Key = tuple[np.dtype, tuple[int, ...], bytes]
Constants = Mapping[_Key, Mapping[bytes, np.ndarray]]
"""What constants of 16 bits were before they were rounded: by dtype, shape and numbers."""
_PRECISIONS = {(8, 7): np.dtype(jnp.bfloat16), (5, 10): np.dtype(np.float16)}


class Unsupported(Exception):
    """A program that cannot be evaluated here, and why."""


def wide(dtype: Any) -> Any:
    """The dtype in which a value is held."""
    if is_key_dtype(dtype):
        return dtype
    if jnp.issubdtype(dtype, np.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jnp.issubdtype(dtype, np.floating) else np.dtype(dtype)


def held(value: Any) -> Any:
    """A value of a program, as it is held."""
    if isinstance(value, Tracer) or is_key_dtype(getattr(value, "dtype", np.float64)):
        return value
    array = np.asarray(value)
    return array.astype(wide(array.dtype))


def exactly(value: np.ndarray, dtype: np.dtype, terms: int) -> np.ndarray:
    """No rounding at all."""
    del dtype, terms
    return value


def nearest(value: np.ndarray, dtype: np.dtype, terms: int) -> np.ndarray:
    """Each result becomes the nearest number of its dtype, as if operations were never fused."""
    del terms
    # Not integers, nor complex numbers.
    return value.astype(dtype).astype(value.dtype) if value.dtype == np.float64 else value


def nearest_half(value: np.ndarray, dtype: np.dtype, terms: int) -> np.ndarray:
    """The same of 16 bits; results of other dtypes are exact."""
    return nearest(value, dtype, terms) if dtype in _NARROW else value


def moved(seed: int, size: float = 1e-13) -> Round:
    """Each result is moved by a tiny random factor."""
    random = np.random.default_rng(seed)

    def apply(value: np.ndarray, dtype: np.dtype, terms: int) -> np.ndarray:
        del dtype, terms
        return value * (1 + size * random.uniform(-1, 1, value.shape))

    return apply


def at_random(seed: int, strength: float = 1.0) -> Round:
    """Each result becomes one of the two nearest numbers of its dtype.

    Args:
        seed: Of the choices.
        strength: How many units of the last place a result may be moved by; sums of many terms may
            have been rounded between, and are moved by more.
    """
    random = np.random.default_rng(seed)

    def apply(value: np.ndarray, dtype: np.dtype, terms: int) -> np.ndarray:
        if not jnp.issubdtype(dtype, np.floating) or not np.issubdtype(value.dtype, np.floating):
            return value
        info = jnp.finfo(dtype)
        with np.errstate(all="ignore"):
            exponent = np.floor(np.log2(np.where(value == 0, 1.0, np.abs(value))))
            exponent = np.where(np.isfinite(exponent), np.maximum(exponent, info.minexp), 0)
            unit = np.exp2(exponent - info.nmant)
            spread = strength * max(1.0, math.sqrt(terms) / 2 if info.bits < 32 else 1.0)
            shift = (random.uniform(0, 1, value.shape) - 0.5) * spread
            rounded = np.round(value / unit + shift) * unit
            rounded = np.where(np.isfinite(value), rounded, value)
            limit = float(info.max)
            return np.where(np.abs(rounded) > limit, np.copysign(np.inf, rounded), rounded)

    return apply


class Evaluator:
    """Evaluates traced programs.

    Args:
        rounding: What becomes of each result.
        models_rounding: Whether that is a model of what runs, which must then be whole.
        constants: What the constants of a program were before they were rounded to 16 bits.
    """

    def __init__(
        self,
        rounding: Round = exactly,
        *,
        models_rounding: bool = False,
        constants: Constants = MappingProxyType({}),
    ) -> None:
        self.rounding, self.models_rounding = rounding, models_rounding
        self.constants = constants
        # By what they were made of, which is kept: JAX compiles an operation again for a program
        # that is another object.
        self.widened: dict[int, tuple[Any, Any]] = {}

    def __call__(self, program: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        """The results of a program."""
        with jax.enable_x64(True), np.errstate(all="ignore"):
            return self._run(program, [held(value) for value in arguments])

    def _run(self, program: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
        values: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            if isinstance(atom, core.Literal):
                return self._unrounded(atom.val, atom.aval.dtype)  # type: ignore[attr-defined]
            return values[atom]

        # Avals have shapes and dtypes; JAX declares neither.
        jaxpr: Any = program.jaxpr
        for variable, value in zip(jaxpr.constvars, program.consts, strict=True):
            values[variable] = self._unrounded(value, variable.aval.dtype)
        values.update(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            results = self._equation(equation, [read(atom) for atom in equation.invars])
            for variable, result in zip(equation.outvars, results, strict=True):
                if not isinstance(result, Tracer) and not is_key(variable.aval):
                    result = np.asarray(result)
                    if result.shape != tuple(variable.aval.shape):
                        raise AssertionError(
                            f"{equation.primitive} gave {result.shape} for {variable.aval}"
                        )
                values[variable] = result
        return [read(atom) for atom in jaxpr.outvars]

    def _unrounded(self, value: Any, dtype: Any) -> Any:
        """A constant as it was before it was rounded to 16 bits."""
        value = _constant(value, dtype)
        if not isinstance(value, np.ndarray) or dtype not in _NARROW:
            return value
        was = self.constants.get(_key(value, dtype), {})
        if any(not np.any(before) for before in was.values()):
            # What else becomes zero is below 1e-38.
            return np.zeros_like(value)
        if len(was) > 1:
            raise Unsupported(f"a constant was one of {sorted(map(str, was.values()))}")
        return next(iter(was.values()), value)

    def _equation(self, equation: Any, values: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name in ("halfstep_apart", "halfstep_settle"):
            return values
        if name == "reduce_precision":
            precision = params["exponent_bits"], params["mantissa_bits"]
            dtype = _PRECISIONS.get(precision, np.dtype(equation.invars[0].aval.dtype))
            return [self.rounding(values[0], dtype, 1)]
        if name in _OWN:
            return self._run(_expanded(equation), values)
        if (structure := structure_of(name, params)) is not None:
            return self._structured(structure, equation, values)
        if name in RULES and all(isinstance(value, np.ndarray) for value in values):
            made = RULES[name](*values, **_widened(params, self))
            results = list(made) if equation.primitive.multiple_results else [made]
        else:
            results = _bound(equation, values, self)
        outs = [variable.aval for variable in equation.outvars]
        results = [
            result if is_key(aval) else _widely_held(result, aval.dtype)
            for result, aval in zip(results, outs, strict=True)
        ]
        if name in EXACT_MOVES:
            return results
        terms = _terms(values, outs)
        return [
            self.rounding(result, np.dtype(aval.dtype), terms)
            if isinstance(result, np.ndarray) and result.dtype.kind in "fc"
            else result
            for result, aval in zip(results, outs, strict=True)
        ]

    def _structured(self, found: Any, equation: Any, values: list[Any]) -> Sequence[Any]:
        traced = any(isinstance(value, Tracer) for value in values)
        if isinstance(found, structures.Scan):
            return self._scan(found, values)
        if isinstance(found, structures.While):
            return self._traced_while(found, values) if traced else self._while(found, values)
        if isinstance(found, structures.Cond):
            if isinstance(values[0], Tracer):
                branches = [functools.partial(self._branch, one) for one in found.branches]
                return found.bind(values[0], branches, *values[1:])
            branch = int(np.clip(values[0], 0, len(found.branches) - 1))
            return self._run(found.branches[branch], values[1:])
        if isinstance(found, structures.ShardMap):
            return self._shard_map(found, values)
        if isinstance(found, structures.LinearSolve):
            lengths, functions = equation.params["const_lengths"], equation.params["jaxprs"]
            first = lengths.matvec + lengths.vecmat
            right = values[sum(lengths) :]
            return self._run(functions.solve, [*values[first : first + lengths.solve], *right])
        if isinstance(
            found,
            structures.Jit
            | structures.Remat
            | structures.CustomJvp
            | structures.CustomVjp
            | structures.CustomVmap,
        ):
            return self._run(found.function, values)
        return _bound(equation, values, self)

    def _scan(self, loop: structures.Scan, values: list[Any]) -> list[Any]:
        consts, carry, xs = loop.split(values)
        carry, turns = list(carry), []
        order = range(loop.length)
        for number in reversed(order) if loop.reverse else order:
            results = self._run(loop.body, [*consts, *carry, *(x[number] for x in xs)])
            carry = list(results[: loop.carries])
            turns.append(results[loop.carries :])
        if loop.reverse:
            turns.reverse()
        avals = loop.body.out_avals[loop.carries :]
        stacked = [
            _stacked([turn[place] for turn in turns], aval) for place, aval in enumerate(avals)
        ]
        return [*carry, *stacked]

    def _while(self, loop: structures.While, values: list[Any]) -> list[Any]:
        of_test, of_body, carry = loop.split(values)
        carry = list(carry)
        for _ in range(1000):
            going = self._run(loop.test, [*of_test, *carry])[0]
            if not np.any(going):
                return carry
            after = self._run(loop.body, [*of_body, *carry])
            # Under `vmap` each element stops by itself: those that have keep what they carry.
            carry = [_where(going, new, old) for new, old in zip(after, carry, strict=True)]
        raise Unsupported("a loop of more than 1,000 iterations")

    def _traced_while(self, loop: structures.While, values: list[Any]) -> list[Any]:
        of_test, of_body, carry = loop.split(values)
        made, _ = loop.bind(
            lambda carry: self._run(loop.test, [*of_test, *carry])[0],
            lambda carry, more: (self._branch(loop.body, *of_body, *carry), more),
            tuple(carry),
            (),
        )
        return list(made)

    def _branch(self, function: ClosedJaxpr, *values: Any) -> tuple[Any, ...]:
        return tuple(self._run(function, list(values)))

    def _shard_map(self, found: structures.ShardMap, values: list[Any]) -> list[Any]:
        if self.models_rounding:
            raise Unsupported("roundings within a shard_map")
        inside = functools.partial(Evaluator(constants=self.constants)._run, found.function)

        # Compiled: without `jit` each operation of each device would be.
        @jax.jit
        def run(*given: Any) -> Any:
            return found.bind(lambda *shards: tuple(inside(list(shards))), *given)

        made = run(*values)
        return [value if isinstance(value, Tracer) else held(value) for value in made]


def constants_of(program: ClosedJaxpr) -> Constants:
    """What numbers of 16 bits may be in a cast program: those of the plain one, rounded.

    A tracer of `autocast` casts a number that is written into the program when it is traced, so
    that no cast is left which could be taken away.
    """
    found: dict[_Key, dict[bytes, np.ndarray]] = {}
    for value in _written(program):
        for dtype in _NARROW:
            with np.errstate(all="ignore"):
                rounded = value.astype(dtype).astype(np.float64)
            before = value.astype(np.float64)
            found.setdefault(_key(rounded, dtype), {})[before.tobytes()] = before
    return found


def _key(value: np.ndarray, dtype: Any) -> _Key:
    # Zeros have signs, which do not matter here.
    return np.dtype(dtype), value.shape, (value + 0.0).tobytes()


def _written(program: ClosedJaxpr) -> Iterator[np.ndarray]:
    """The float32 numbers and arrays that are written into a program."""
    for value in program.consts:
        if not isinstance(value, Tracer) and not is_key(value):
            array = np.asarray(value)
            if array.dtype == np.float32:
                yield array
    for equation in program.jaxpr.eqns:
        for atom in equation.invars:
            if isinstance(atom, core.Literal) and atom.aval.dtype == np.float32:  # type: ignore[attr-defined]
                yield np.asarray(atom.val, np.float32)
        for inner in jaxprs_in(equation.params):
            yield from _written(inner)


def _widely_held(value: Any, dtype: Any) -> Any:
    """A result in float64, also one of an operation that makes no other dtype than its own."""
    if isinstance(value, Tracer):
        return jax.lax.convert_element_type(value, wide(dtype))
    return np.asarray(value).astype(wide(dtype))


def _constant(value: Any, dtype: Any) -> Any:
    """A value that is written into a program, which may have it in more digits than its dtype."""
    if is_key_dtype(dtype):
        return value
    if isinstance(value, Tracer):
        return jax.lax.convert_element_type(value, wide(dtype))
    return held(np.asarray(value).astype(dtype))


def _expanded(equation: Any) -> ClosedJaxpr:
    """The program of one of halfstep's own primitives, as it runs eagerly."""
    function = functools.partial(equation.primitive.impl, **equation.params)
    avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
    with jax.enable_x64(False):
        return jax.make_jaxpr(function)(*avals)


def _stacked(turns: Sequence[Any], aval: Any) -> Any:
    if any(isinstance(turn, Tracer) for turn in turns):
        return jnp.stack(turns)
    if is_key(aval):
        return jnp.stack(turns) if turns else jnp.zeros((0, *aval.shape), aval.dtype)
    if not turns:
        return np.zeros((0, *aval.shape), wide(aval.dtype))
    return np.stack(turns)


def _where(going: np.ndarray, new: Any, old: Any) -> Any:
    if not going.shape:
        return new
    aligned = going.reshape(going.shape + (1,) * (new.ndim - going.ndim))
    # Keys are JAX's own.
    where = np.where if isinstance(new, np.ndarray) else jnp.where
    return where(aligned, new, old)


def _terms(values: Sequence[Any], outs: Sequence[Any]) -> int:
    """About how many numbers went into one number of a result."""
    given = max((value.size for value in values if hasattr(value, "size")), default=1)
    made = max((math.prod(aval.shape) for aval in outs), default=1)
    return max(1, given // max(made, 1))


def _bound(equation: Any, values: Sequence[Any], evaluator: Evaluator) -> list[Any]:
    """A primitive bound in float64."""
    if equation.primitive.name == "bitcast_convert_type":
        # Bits are those of the declared dtype. To the same dtype, nothing is done.
        declared = equation.invars[0].aval.dtype
        if declared == equation.params["new_dtype"]:
            return list(values)
        return [
            jax.lax.bitcast_convert_type(_as(values[0], declared), equation.params["new_dtype"])
        ]
    try:
        return bind_again(equation.primitive, _widened(equation.params, evaluator), values)
    except TypeError as error:
        if "forward-mode autodiff (jvp) to a custom_vjp" not in str(error):
            raise
        # The plain program is traced for reverse mode, and has what JAX cannot run by itself.
        raise Unsupported(f"{equation.primitive.name} holds a rule for reverse mode") from error


def _as(value: Any, dtype: Any) -> Any:
    return jax.lax.convert_element_type(value, dtype)


def _widened(params: Mapping[str, Any], evaluator: Evaluator) -> dict[str, Any]:
    return {name: _wide_parameter(value, evaluator) for name, value in params.items()}


def _wide_parameter(value: Any, evaluator: Evaluator) -> Any:
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return wide(value)
    if isinstance(value, ClosedJaxpr | core.Jaxpr):
        if id(value) not in evaluator.widened:
            is_closed = isinstance(value, ClosedJaxpr)
            made = _wide_program(value if is_closed else ClosedJaxpr(value, ()), evaluator)
            evaluator.widened[id(value)] = value, made if is_closed else made.jaxpr
        return evaluator.widened[id(value)][1]
    if isinstance(value, jax.lax.RaggedDotDimensionNumbers):
        # A map of a map leaves NumPy's integers here, on which JAX's own lowering fails.
        return jax.lax.RaggedDotDimensionNumbers(
            dot_dimension_numbers=_whole(value.dot_dimension_numbers),
            lhs_ragged_dimensions=_whole(value.lhs_ragged_dimensions),
            rhs_group_dimensions=_whole(value.rhs_group_dimensions),
        )
    return value


def _whole(numbers: Any) -> Any:
    """The same tuples with Python's integers."""
    return tuple(map(_whole, numbers)) if isinstance(numbers, Sequence) else int(numbers)


def _wide_program(program: ClosedJaxpr, evaluator: Evaluator) -> ClosedJaxpr:

    def wider(aval: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(aval.shape, wide(aval.dtype))

    run = functools.partial(Evaluator(constants=evaluator.constants)._run, program)
    return jax.make_jaxpr(lambda *values: run(list(values)))(*map(wider, program.in_avals))
