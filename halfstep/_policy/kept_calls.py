"""Call functions so that their inside stays in float32, whatever the policy says."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from halfstep._base import Arguments, DTypeLike, widest
from halfstep._policy.cast import cast_function, is_castable

T = TypeVar("T")

# The mark is a named scope and not a flag: a scope is part of each operation that is traced, so
# `jit`, `grad`, `vmap`, `scan` and `jax.checkpoint` all carry it along, and a function whose trace
# JAX has cached still has it. `autocast` reads it from the operations.
KEEP_SCOPE = "halfstep.keep_precision"
"""The named scope that marks the kept part; every transformation of JAX preserves it."""


def full_precision_call(
    func: Callable[..., T],
    return_dtype: DTypeLike | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> T:
    """Call a function with arguments in float32, and cast its results back."""
    if return_dtype is None:
        # Back to the dtype of the arguments, so that the surroundings never see another dtype.
        given = Arguments(func, args, kwargs).leaves
        dtypes = {x.leaf.dtype for x in given if is_castable(x.leaf) and not x.is_state}
        if dtypes:
            return_dtype = jax.dtypes.canonicalize_dtype(widest(dtypes))
    call = cast_function(func, jnp.float32, return_dtype)
    # If the arguments are float32 already, only this scope tells `autocast` to keep float32.
    with jax.named_scope(KEEP_SCOPE):
        return call(*args, **kwargs)
