"""Provide the names of MPfJ, as mpx was called at first: `import halfstep.compat.mpfj as mpfj`.

MPfJ's README names `cond_update`, and its first code has `optimizer_update` instead: both are here.
All other names are those of `halfstep.compat.mpx`.
"""

from typing import Any, TypeVar

import optax

from halfstep.compat.mpx import (
    DynamicLossScaling as DynamicLossScaling,
    all_finite as all_finite,
    cast_to_bfloat16 as cast_to_bfloat16,
    cast_to_float16 as cast_to_float16,
    cast_to_float32 as cast_to_float32,
    cast_to_full_precision as cast_to_full_precision,
    cast_to_half_precision as cast_to_half_precision,
    cast_tree as cast_tree,
    filter_grad as filter_grad,
    filter_value_and_grad as filter_value_and_grad,
    force_full_precision as force_full_precision,
    optimizer_update as optimizer_update,
    scaled as scaled,
    select_tree as select_tree,
    set_half_precision_datatype as set_half_precision_datatype,
)

__all__ = (
    "DynamicLossScaling",
    "all_finite",
    "cast_to_bfloat16",
    "cast_to_float16",
    "cast_to_float32",
    "cast_to_full_precision",
    "cast_to_half_precision",
    "cast_tree",
    "cond_update",
    "filter_grad",
    "filter_value_and_grad",
    "force_full_precision",
    "optimizer_update",
    "scaled",
    "select_tree",
    "set_half_precision_datatype",
)


def __dir__() -> list[str]:
    return sorted(__all__)


T = TypeVar("T")


def cond_update(
    model: T,
    optimizer: optax.GradientTransformation,
    optimizer_state: Any,
    grads: Any,
    grads_finite: Any,
    **extra_args: Any,
) -> tuple[T, Any]:
    """Apply an optimizer's step if the gradients are finite, else leave everything unchanged.

    MPfJ's README names this function and shows no call of it. The arguments are those of
    `optimizer_update`, which took its place in MPfJ's code.

    Args:
        model: Any pytree; its inexact arrays are trained.
        optimizer: Any Optax optimizer.
        optimizer_state: The state of the optimizer.
        grads: Gradients.
        grads_finite: A boolean scalar.
        **extra_args: Passed to `optimizer.update`.
    """
    return optimizer_update(model, optimizer, optimizer_state, grads, grads_finite, **extra_args)
