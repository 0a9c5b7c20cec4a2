"""A rounded number is one number, whoever reads it.

Compilers compute bfloat16 arithmetic in float32 and round the result. Where the result is read in
float32 again, or by the next operation of that kind, they leave the rounding out (it is more exact,
and `xla_allow_excess_precision` allows it); where the result is written to memory, they round. So
two readers may see two numbers: the maximum of some logits, and a logit that is above the maximum.

Rounding here is explicit: `reduce_precision`, which no compiler leaves out. It stands where a value
is read and not where it is made. On an H100 the second form was measured to take 9 % more memory
for a ViT: XLA keeps the value before and after the rounding, since either is as cheap to read. The
first form costs nothing: all readers share it, and it is fused with each of them.

Float16 has instructions of its own, and what is left out there is the rounding between a product
and a sum that become one instruction. `reduce_precision` to float16's exponents would lose its
subnormal numbers, so exponents stay float32's: numbers of float16 pass as they are.
"""

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# Constants of a program come as NumPy's.
_Value = TypeVar("_Value", bound=jax.Array | np.ndarray | np.number)
_BFLOAT16 = np.dtype(jnp.bfloat16)
_LOW = (_BFLOAT16, np.dtype(np.float16))
_FLOAT32 = np.dtype(np.float32)
NAME = "halfstep_settle"
# A primitive of its own, for three reasons. Which platforms round is only known when the program is
# lowered for one of them. `explain` and `debug` can tell it from what the user has written. And its
# derivative is the identity, where that of `reduce_precision` rounds the cotangents once more.
_settle = Primitive(NAME)


class Rounding(enum.IntEnum):
    """Whether all readers of a value see the same rounding of it."""

    SETTLED = 0
    """They do."""
    LOOSE_ON_CPU = 1
    """Not on CPUs: a product, which GPUs and TPUs write to memory, or hand on to one reader."""
    LOOSE = 2
    """Not anywhere: made by arithmetic in the compute dtype."""


def settled(value: _Value, rounding: Rounding = Rounding.LOOSE) -> _Value:
    """A value in the compute dtype, as whoever reads it from memory sees it."""
    return _written_out(value, value.dtype, rounding)


def widened(value: jax.Array | np.ndarray | np.number, rounding: Rounding) -> jax.Array:
    """The same, in float32."""
    wide = jax.lax.convert_element_type(value, _FLOAT32)
    return _written_out(wide, value.dtype, rounding)


def representable(value: _Value, dtype: np.dtype) -> _Value:
    """The nearest numbers that a dtype has, still in float32: a cast to it changes nothing more.

    Only for bfloat16; float16 has instructions of its own, and its casts are never undone.
    """
    if dtype != _BFLOAT16 or value.dtype != _FLOAT32:
        return value
    return _written_out(value, dtype, Rounding.LOOSE)


def cast(value: jax.Array | np.ndarray | np.number, dtype: np.dtype) -> jax.Array:
    """A value in another dtype, which whoever reads it in float32 sees as rounded to that dtype.

    Readers in `dtype` itself still have to see to it that it is `settled`. Compilers do not undo a
    cast that is written out, except XLA:CPU where a sum of bfloat16 numbers reads it. A cast to
    float16 is never undone: its readers have instructions for that dtype.
    """
    if dtype == _BFLOAT16 and value.dtype == _FLOAT32:
        value = _written_out(value, dtype, Rounding.LOOSE_ON_CPU)
    return jax.lax.convert_element_type(value, dtype)


def _written_out(value: _Value, dtype: np.dtype, rounding: Rounding) -> _Value:
    """A value whose rounding to a dtype of 16 bits is part of the program, if it has to be."""
    if rounding is Rounding.SETTLED or dtype not in _LOW:
        return value
    return _settle.bind(value, dtype=dtype, only_cpu=rounding is Rounding.LOOSE_ON_CPU)


def _rounded(value: jax.Array, *, dtype: np.dtype, only_cpu: bool) -> jax.Array:
    del only_cpu
    wide = jax.lax.convert_element_type(value, _FLOAT32)
    rounded = jax.lax.reduce_precision(wide, jnp.finfo(_FLOAT32).nexp, jnp.finfo(dtype).nmant)
    return jax.lax.convert_element_type(rounded, value.dtype)


def _rounded_elsewhere(value: jax.Array, *, dtype: np.dtype, only_cpu: bool) -> jax.Array:
    return value if only_cpu else _rounded(value, dtype=dtype, only_cpu=only_cpu)


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], **params: Any
) -> tuple[jax.Array, jax.Array]:
    return _settle.bind(*primals, **params), tangents[0]


# Outside of a compiled function every operation rounds what it makes.
_settle.def_impl(lambda value, **_: value)
_settle.def_abstract_eval(lambda value, **_: value)
ad.primitive_jvps[_settle] = _jvp
ad.primitive_transposes[_settle] = lambda cotangent, *_, **__: [cotangent]
batching.defvectorized(_settle)
mlir.register_lowering(_settle, mlir.lower_fun(_rounded_elsewhere, multiple_results=False))
mlir.register_lowering(_settle, mlir.lower_fun(_rounded, multiple_results=False), platform="cpu")
