"""Leaves that are not compressed: small ones, complex ones, and those that are to be kept."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep.kernels.flash_update._math import updated
from halfstep.kernels.flash_update._spec import Moments, Scalars, Spec
from halfstep.optim._layout import zeros
from halfstep.quant import join
from halfstep.quant._split import parted


def plain_zeros(leaf: Any, *, real: bool = False) -> Any:
    """A moment of zeros, in float32 or what is wider."""
    dtype = np.promote_types(leaf.dtype, jnp.float32)
    if real and jnp.issubdtype(dtype, jnp.complexfloating):
        dtype = jnp.finfo(dtype).dtype
    return zeros(leaf.shape, dtype, leaf)


def plain_update(
    param: Any, low: Any, first: Any, second: Any, grad: Any, by: Scalars, spec: Spec
) -> tuple[Any, Any, Any, Any]:
    """One step of a parameter whose moments are stored as they are."""
    wide = np.promote_types(param.dtype, jnp.float32)
    value = param.astype(wide) if low is None else join(param, low)
    # Real hyperparameters meet complex values.
    with jax.numpy_dtype_promotion("standard"):
        new = updated(Moments(value, first, second), grad.astype(wide), by, spec)
    made = parted(new.value, param, low)
    keep = jnp.asarray(by.keep, bool)
    pairs = zip((*made, new.first, new.second), (param, low, first, second), strict=True)
    param, low, first, second = (None if b is None else jnp.where(keep, a, b) for a, b in pairs)
    return param, low, first, second
