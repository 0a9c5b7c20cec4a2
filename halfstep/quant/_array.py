"""Write arrays in 8 or 4 bits: codes, and a scale for each group."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float32, Key, Shaped

from halfstep._base import checked
from halfstep.quant._codes import Code, as_code, as_scale_dtype, scale_of
from halfstep.quant._groups import Groups, groups_for
from halfstep.quant._nibbles import packed, stored_shape, unpacked
from halfstep.quant._split import check_dtype, widened


class Quantized(NamedTuple):
    """An array in 8 or 4 bits: codes and scales. Both are plain arrays, sharded alike.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import quant

        small = quant.quantize(jnp.ones((64, 8)))
        assert isinstance(small, quant.Quantized)
        assert small.codes.shape == (64, 8) and small.codes.dtype == jnp.int8
        # One for every 32 rows of a column.
        assert small.scale.shape == (2, 8) and small.scale.dtype == jnp.bfloat16
        ```
    """

    codes: Shaped[Array, "..."]
    scale: Shaped[Array, "..."]


@checked
def quantize(
    value: Float32[Array, "..."],
    code: str | Code = "int8",
    *,
    groups: Groups | None = None,
    scale_dtype: DTypeLike = "bfloat16",
    key: Key[Array, ""] | None = None,
) -> Quantized:
    """Write an array in 8 or 4 bits.

    A value that is not finite makes its group NaN.

    Args:
        value: The values to write, in float32. The codes of roots, `"root8"`, `"root4"` and
            `"rootf8"`, need values that are not negative, such as second moments.
        code: The name of a code: `"int8"`, `"root8"`, `"int4"`, `"root4"`, `"f8"` or `"rootf8"`.
        groups: Which elements share a scale; by default 32 along the last axis but one.
            Codes of 4 bits need groups of an even size.
        scale_dtype: The dtype of the scales: bfloat16, rounded up, or float32.
        key: If given, codes are rounded up or down at random, so that the mean of many decoded
            values is right. Codes that are floats are always rounded to the nearest.

    Returns:
        The codes and the scales.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import quant

        value = jax.random.normal(jax.random.key(0), (64, 128))
        small = quant.quantize(value)
        assert small.codes.dtype == jnp.int8
        assert small.scale.shape == (2, 128)
        error = abs(quant.dequantize(small) - value)
        assert jnp.max(error) < jnp.max(abs(value)) / 64
        ```
    """
    code = as_code(code)
    check_dtype(value, jnp.float32, "quantize")
    groups = _checked(groups or groups_of(value.shape), value.shape, code)
    scale_dtype = as_scale_dtype(scale_dtype)
    divided = groups.divided(value)
    coded = jnp.sqrt(divided) if code.is_root else divided
    axis = divided.ndim + groups.axis
    # A last group that is not full is padded with zeros, which change no maximum.
    scale = scale_of(jnp.max(jnp.abs(coded), axis=axis, keepdims=True), scale_dtype)
    noise = None if key is None else jax.random.uniform(key, coded.shape, jnp.float32)
    codes = code.encode(coded, widened(scale), noise=noise)
    if code.bits == 4:
        codes = packed(codes, axis).reshape(stored_shape(value.shape, code, groups))
    else:
        codes = groups.whole(codes, value.shape)
    return Quantized(codes, jnp.squeeze(scale, axis))


@checked
def dequantize(
    array: Quantized,
    code: str | Code = "int8",
    *,
    groups: Groups | None = None,
    shape: tuple[int, ...] | None = None,
) -> Float32[Array, "..."]:
    """Return the values that `quantize` has written.

    Args:
        array: Codes and scales.
        code: The code that the array was written with.
        groups: The groups that the array was written with.
        shape: The shape of the values. Only codes of 4 bits need it, since two values share a byte:
            without the shape, the padding of a last group is returned too.

    Returns:
        Float32 values.

    Example:
        ```python
        import jax.numpy as jnp
        from halfstep import quant

        value = jnp.linspace(-1, 1, 64)
        small = quant.quantize(value, "int4")
        assert small.codes.nbytes == 32
        error = quant.dequantize(small, "int4", shape=value.shape) - value
        assert jnp.max(abs(error)) < 0.15
        ```
    """
    code = as_code(code)
    shape = _value_shape(array, code, groups) if shape is None else shape
    groups = _checked(groups or groups_of(shape), shape, code)
    _check_fits(array, code, groups, shape)
    if code.bits == 4:
        axis = len(shape) + groups.axis
        half = Groups(groups.axis, groups.size // 2)
        codes = unpacked(half.divided(array.codes), axis + 1, signed=not code.is_root)
    else:
        codes = groups.divided(array.codes)
    value = code.decode(codes, widened(groups.aligned(array.scale)))
    return groups.whole(value * value if code.is_root else value, shape)


def groups_of(shape: tuple[int, ...]) -> Groups:
    """Return the groups of an array on one device; a small array is one group per row."""
    if not shape:
        raise ValueError(
            "a scalar has no groups: required an array of one dimension or more; got shape=(). "
            "Keep it as it is, or reshape it to (1,)."
        )
    # The size is even, for codes of 4 bits.
    return groups_for(shape) or Groups(-1, max(2, shape[-1] + shape[-1] % 2))


def _checked(groups: Groups, shape: tuple[int, ...], code: Code) -> Groups:
    if not -len(shape) <= groups.axis < 0:
        raise ValueError(
            f"groups.axis is counted from the end, from -1 to -{len(shape)} for an array of shape "
            f"{list(shape)}; got axis={groups.axis}."
        )
    if groups.size < 1 or (code.bits == 4 and groups.size % 2):
        even = "even, since two codes share a byte" if code.bits == 4 else "1 or more"
        raise ValueError(f"groups.size must be {even}; got size={groups.size}, code={code.name!r}.")
    return groups


def _check_fits(array: Quantized, code: Code, groups: Groups, shape: tuple[int, ...]) -> None:
    wanted = (stored_shape(shape, code, groups), groups.scale_shape(shape))
    got = (array.codes.shape, array.scale.shape)
    if got != wanted or array.codes.dtype != code.dtype:
        raise ValueError(
            f"an array of shape {list(shape)} in {code.name!r}, in groups of {groups.size} along "
            f"axis {groups.axis}, has codes of {code.dtype.name}{list(wanted[0])} and scales of "
            f"shape {list(wanted[1])}; got {array.codes.dtype.name}{list(got[0])} and "
            f"{list(got[1])}. Pass the code, the groups and the shape that it was written with."
        )


def _value_shape(array: Quantized, code: Code, groups: Groups | None) -> tuple[int, ...]:
    """Return the shape of the values that were written, if their groups were full."""
    dims = list(array.codes.shape)
    if code.bits == 8:
        return tuple(dims)
    pairs = zip(dims, array.scale.shape, strict=True)
    divided = [i for i, (stored, scales) in enumerate(pairs) if stored != scales]
    # Groups of two have as many bytes as scales. By default such groups lie along the last axis.
    dims[groups.axis if groups else divided[0] if divided else -1] *= 2
    return tuple(dims)
