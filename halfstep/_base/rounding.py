"""Make all readers of a rounded value see the same number.

Compilers compute bfloat16 arithmetic in float32 and round the result. Where the result is read in
float32 again, or by the next operation of that kind, they omit the rounding (this is more exact,
and `xla_allow_excess_precision` allows it); where the result is written to memory, they round. So
two readers may see two numbers: the maximum of some logits, and a logit that is above the maximum.

Rounding here is explicit: it is a `reduce_precision`, which no compiler omits. It is placed where a
value is read and not where the value is computed. On an H100, rounding where the value is computed
was measured to take 9 % more memory for a ViT: XLA keeps the value before and after the rounding,
since both are equally cheap to read. Rounding where the value is read costs nothing: all readers
share the rounding, and it is fused with each of them.

Float16 has its own instructions, and compilers omit the rounding between a product and a sum that
become one instruction. `reduce_precision` to float16's exponents would lose the subnormal numbers,
so exponents stay float32's: float16 numbers pass unchanged.
"""

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# Constants of a program are NumPy arrays and scalars.
_Value = TypeVar("_Value", bound=jax.Array | np.ndarray | np.number)
_BFLOAT16 = np.dtype(jnp.bfloat16)
_LOW = (_BFLOAT16, np.dtype(np.float16))
_FLOAT32 = np.dtype(np.float32)
NAME = "halfstep_settle"
# This is a separate primitive, for three reasons. Only some platforms round, and the platform is
# only known when the program is lowered. `explain` and `debug` can tell it from operations that the
# user has written. And its derivative is the identity, while the derivative of `reduce_precision`
# rounds the cotangents once more.
_settle = Primitive(NAME)


class Rounding(enum.IntEnum):
    """Whether all readers of a value see the same rounding of it."""

    SETTLED = 0
    """All readers see the same."""
    LOOSE_ON_CPU = 1
    """Readers may differ on CPUs: a product, which GPUs and TPUs write to memory, or pass on to
    one reader."""
    LOOSE = 2
    """Readers may differ everywhere: the value is made by arithmetic in the compute dtype."""


def settled(value: _Value, rounding: Rounding = Rounding.LOOSE) -> _Value:
    """Return a value in the compute dtype, rounded as it would be in memory."""
    return _written_out(value, value.dtype, rounding)


def widened(value: jax.Array | np.ndarray | np.number, rounding: Rounding) -> jax.Array:
    """Return the same as `settled`, in float32."""
    wide = jax.lax.convert_element_type(value, _FLOAT32)
    return _written_out(wide, value.dtype, rounding)


def representable(value: _Value, dtype: np.dtype) -> _Value:
    """Round to the nearest numbers of a dtype, in float32, so that a cast to it changes nothing.

    This is for bfloat16 only: float16 has its own instructions, and casts to it are never undone.
    """
    if dtype != _BFLOAT16 or value.dtype != _FLOAT32:
        return value
    return _written_out(value, dtype, Rounding.LOOSE)


def cast(value: jax.Array | np.ndarray | np.number, dtype: np.dtype) -> jax.Array:
    """Cast a value to another dtype, so that readers in float32 see it rounded to that dtype.

    Readers in `dtype` itself still have to make sure that the value is `settled`. Compilers do not
    undo an explicit cast, except XLA:CPU where a sum of bfloat16 numbers reads it. A cast to
    float16 is never undone: its readers have instructions for that dtype.
    """
    if dtype == _BFLOAT16 and value.dtype == _FLOAT32:
        value = _written_out(value, dtype, Rounding.LOOSE_ON_CPU)
    return jax.lax.convert_element_type(value, dtype)


def _written_out(value: _Value, dtype: np.dtype, rounding: Rounding) -> _Value:
    """Make the rounding of a value to a 16-bit dtype part of the program, if it has to be."""
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


# Outside a compiled function every operation rounds its result.
_settle.def_impl(lambda value, **_: value)
_settle.def_abstract_eval(lambda value, **_: value)
ad.primitive_jvps[_settle] = _jvp
ad.primitive_transposes[_settle] = lambda cotangent, *_, **__: [cotangent]
batching.defvectorized(_settle)
mlir.register_lowering(_settle, mlir.lower_fun(_rounded_elsewhere, multiple_results=False))
mlir.register_lowering(_settle, mlir.lower_fun(_rounded, multiple_results=False), platform="cpu")
