"""Pack two codes of 4 bits into a byte."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from halfstep.quant._codes import Code
from halfstep.quant._groups import Groups


def packed(codes: Shaped[Array, "..."], axis: int) -> Shaped[Array, "..."]:
    """Pack two codes into a byte: one of the first half of a group, and one of its second.

    Halves are packed, not neighbors: halves are contiguous slices, which need no strided loads.
    """
    # In 32 bits, since Mosaic TPU has no arithmetic of 8.
    first, second = jnp.split(codes.astype(jnp.int32), 2, axis=axis)
    return ((first & 15) | ((second & 15) << 4)).astype(jnp.uint8)


def unpacked(codes: Shaped[Array, "..."], axis: int, *, signed: bool) -> Int32[Array, "..."]:
    """Undo `packed` along the axis of a group."""
    wide = codes.astype(jnp.int32)
    return jnp.concatenate([nibble(wide, part, signed=signed) for part in (0, 1)], axis=axis)


def nibble(both: Int32[Array, "..."], part: int, *, signed: bool) -> Int32[Array, "..."]:
    """Return the first or the second of the codes that share a byte."""
    found = both >> 4 if part else both & 15
    # The sign is the fourth bit.
    return (found ^ 8) - 8 if signed else found


def stored_shape(shape: Sequence[int], code: Code, groups: Groups) -> tuple[int, ...]:
    """Return the shape of the codes of an array."""
    dims = list(shape)
    if code.bits == 4:
        dims[groups.axis] = groups.count(shape) * groups.size // 2
    return tuple(dims)
