"""Random programs are text: what failed can be read, pasted into a report, and run."""

import dataclasses
import functools
import itertools
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

import halfstep

FLOATS = ("float32", "bfloat16", "float16")
_numbers = itertools.count()


@dataclasses.dataclass
class Statement:
    """One line of a program.

    Attributes:
        text: An expression with `{0}`, `{1}` for operands and `{f}`, `{g}` for inner functions.
        operands: Numbers of the values it reads.
        results: What it makes.
        inner: The functions it calls.
        is_tuple: Whether it makes a tuple, also of one value.
    """

    text: str
    operands: tuple[int, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    inner: tuple["Program", ...] = ()
    is_tuple: bool = False


@dataclasses.dataclass
class Program:
    """A function of arrays: its values are numbered, arguments first."""

    arguments: tuple[jax.ShapeDtypeStruct, ...]
    statements: list[Statement] = dataclasses.field(default_factory=list)
    returned: list[int] = dataclasses.field(default_factory=list)

    def values(self) -> list[jax.ShapeDtypeStruct]:
        """What all values are, by number."""
        made = itertools.chain.from_iterable(line.results for line in self.statements)
        return [*self.arguments, *made]

    def size(self) -> int:
        """How many statements there are, those of inner functions included."""
        return sum(1 + sum(map(Program.size, line.inner)) for line in self.statements)

    def source(self, name: str = "program", depth: int = 0) -> str:
        """The program as Python."""
        return "\n".join(self._lines(name, depth))

    def _lines(self, name: str, depth: int) -> Iterator[str]:
        letter, indent = "abcdefgh"[depth], "    " * depth
        arguments = ", ".join(f"{letter}{i}" for i in range(len(self.arguments)))
        yield f"{indent}def {name}({arguments}):"
        number = len(self.arguments)
        for place, line in enumerate(self.statements):
            called = {}
            for key, inner in zip("fg", line.inner, strict=False):
                called[key] = f"{key}{depth}_{place}"
                yield from inner._lines(called[key], depth + 1)
            text = line.text.format(*(f"{letter}{i}" for i in line.operands), **called)
            made = [f"{letter}{number + i}" for i in range(len(line.results))]
            target = ", ".join(made) + ("," if line.is_tuple and len(made) == 1 else "")
            yield f"{indent}    {target} = {text}"
            number += len(made)
        returned = "".join(f"{letter}{i}, " for i in self.returned)
        yield f"{indent}    return ({returned})"

    def function(self) -> Callable[..., tuple[Any, ...]]:
        """The program as a function, whose lines tracebacks and reports can show."""
        return compiled(self.source())["program"]


def compiled(source: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a text defines, with the names that programs use, or that are given."""
    name = f"<random program {next(_numbers)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    names = dict(NAMES if given is None else given)
    exec(compile(source, name, "exec"), names)
    return names


def shapes_of(text: str, operands: Sequence[jax.ShapeDtypeStruct], inner: Sequence[Program]) -> Any:
    """What an expression makes of operands."""
    given = [f"x{i}" for i in range(len(operands))]
    parts = [program.source(key) for key, program in zip("fg", inner, strict=False)]
    called = {key: key for key, _ in zip("fg", inner, strict=False)}
    parts.append(f"def expression({', '.join(given)}):\n    return {text.format(*given, **called)}")
    return jax.eval_shape(compiled("\n".join(parts))["expression"], *operands)


def is_float(aval: Any) -> bool:
    """Whether a value is of a floating-point dtype of ordinary arrays."""
    return str(aval.dtype) in FLOATS


def is_key(aval: Any) -> bool:
    """Whether a value is a key of random numbers."""
    return is_key_dtype(aval.dtype)


def is_key_dtype(dtype: Any) -> bool:
    """Whether a dtype is that of keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


# Names that programs use beside JAX's own.


def fit(value: jax.Array, shape: tuple[int, ...], dtype: str = "float32") -> jax.Array:
    """Any numbers as an array of a shape and dtype; floating-point ones stay small."""
    if is_key(value):
        value = jax.random.key_data(value).astype(jnp.uint8)
    if dtype in FLOATS and not is_float(value):
        value = jnp.clip(value.astype(jnp.float32), -8, 8) * 0.25
    elif dtype not in FLOATS and is_float(value):
        value = value > 0.1 if dtype == "bool" else jnp.clip(jnp.round(value * 2), 0, 5)
    if value.shape != shape:
        empty = 0 in value.shape or 0 in shape
        value = jnp.zeros(shape, value.dtype) if empty else jnp.resize(value, shape)
    return lax.convert_element_type(value, dtype)


def definite(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A symmetric matrix whose eigenvalues are at least 2."""
    matrix = jnp.tanh(fit(value, shape))
    return matrix @ matrix.T + 2 * jnp.eye(shape[0])


def with_jvp(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, with the same derivative as a rule of its own."""
    own = jax.custom_jvp(function)
    own.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
    return own


def with_vjp(function: Callable[..., Any], kept: str = "vjp") -> Callable[..., Any]:
    """The same, by reverse mode; what is kept for it is the inputs, or JAX's own residuals."""
    own = jax.custom_vjp(function)
    if kept == "inputs":
        own.defvjp(
            lambda *values: (function(*values), values),
            lambda values, cotangents: jax.vjp(function, *values)[1](cotangents),
        )
    else:
        own.defvjp(
            lambda *values: jax.vjp(function, *values), lambda pull, cotangents: pull(cotangents)
        )
    return own


def half_sum(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """The sum of a function's first result, as something to differentiate."""
    return lambda *values: jnp.sum(function(*values)[0]) * 0.5


@functools.cache
def mesh(*names: str) -> jax.sharding.Mesh:
    """Four devices, in a line or in a square."""
    shape = (4,) if len(names) == 1 else (2, 2)
    return jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def wrong_forward(value: jax.Array, by: float) -> jax.Array:
    """A planted error: a value that is too large by a share, with the right derivative."""
    return value + lax.stop_gradient(value * by).astype(value.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def wrong_backward(value: jax.Array, by: float) -> jax.Array:
    """A planted error: a gradient that is too large by a share."""
    del by
    return value


def _grown(by: float, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (cotangent * np.asarray(1 + by, cotangent.dtype),)


wrong_backward.defvjp(lambda value, by: (wrong_backward(value, by), None), _grown)

NAMES = {
    "P": PartitionSpec,
    "checkpoint_name": checkpoint_name,
    "definite": definite,
    "fit": fit,
    "functools": functools,
    "half_sum": half_sum,
    "halfstep": halfstep,
    "jax": jax,
    "jnp": jnp,
    "lax": lax,
    "mesh": mesh,
    "np": np,
    "policies": jax.checkpoint_policies,
    "with_jvp": with_jvp,
    "with_vjp": with_vjp,
    "wrong_backward": wrong_backward,
    "wrong_forward": wrong_forward,
}
"""What the text of a program may name."""
