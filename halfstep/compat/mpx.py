"""Provide the names of mpx 0.1.8: `import halfstep.compat.mpx as mpx` is the whole migration.

Signatures and orders of returns are mpx's, and so is the default of float16 for "half precision".
Mistakes of mpx are corrected here; the migration guide lists each difference.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool

from halfstep import _policy, _training
from halfstep._base import FORMATS, DTypeLike, is_array, parse_dtype
from halfstep._policy import Policy
from halfstep.compat._scale import power_of_two_below

__all__ = (
    "BFLOAT16_MAX",
    "FLOAT16_MAX",
    "HALF_PRECISION_DATATYPE",
    "DynamicLossScaling",
    "all_finite",
    "calculate_scaled_grad",
    "cast_function",
    "cast_to_bfloat16",
    "cast_to_float16",
    "cast_to_float32",
    "cast_to_full_precision",
    "cast_to_half_precision",
    "cast_tree",
    "filter_grad",
    "filter_value_and_grad",
    "force_full_precision",
    "half_precision_datatype",
    "optimizer_update",
    "scaled",
    "select_tree",
    "set_half_precision_datatype",
)


def __dir__() -> list[str]:
    return sorted(__all__)


T = TypeVar("T")

FLOAT16_MAX: Array
BFLOAT16_MAX: Array
HALF_PRECISION_DATATYPE: Any

# This context is separate from `halfstep.half_precision`, because "half" is float16 in mpx and
# bfloat16 in halfstep. As a part of JAX's trace context it belongs to every jit cache key: a
# function that was traced for float16 is traced anew for bfloat16, which mpx's module variable
# cannot achieve.
_HALF = jax.make_user_context(np.dtype(np.float16))

# mpx holds the scale at or below 65504, the largest float16; this is the power of two below it.
_CEILING = 2.0**15


def __getattr__(name: str) -> Any:
    # Arrays are made on access: an array that is made at import would start JAX's backend.
    if name in ("FLOAT16_MAX", "BFLOAT16_MAX"):
        largest = FORMATS["f16" if name == "FLOAT16_MAX" else "bf16"].max
        with jax.ensure_compile_time_eval():
            return jnp.asarray(largest, jnp.float32)
    if name == "HALF_PRECISION_DATATYPE":
        return half_precision_datatype()
    # Python itself asks for names that may not exist. This is the wording of its own error.
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def half_precision_datatype() -> Any:
    """Return the "half precision" dtype of this module: `jnp.float16` unless another was set."""
    return getattr(jnp, _HALF.value.name)


def set_half_precision_datatype(datatype: DTypeLike) -> None:
    """Set the "half precision" dtype of this module, from now on and in this thread.

    Functions that were jitted before are traced anew.

    Args:
        datatype: `"float16"` or `"bfloat16"`, or the dtype itself.
    """
    required = 'required "float16" or "bfloat16", or the dtype itself'
    try:
        resolved = parse_dtype(datatype)
    except ValueError as error:
        kind = ValueError if isinstance(datatype, str) else TypeError
        raise kind(f"{required}; got {datatype!r}.") from error
    if resolved.itemsize != 2:
        raise ValueError(f"{required}; got {datatype!r}, which has {8 * resolved.itemsize} bits.")
    # The context is entered and never left, so that it becomes this thread's value.
    _HALF(resolved).__enter__()


def cast_tree(tree: T, dtype: DTypeLike) -> T:
    """Cast the floating-point arrays of a pytree, NumPy's included."""
    return _policy.cast_tree(tree, dtype)


def cast_to_half_precision(x: T) -> T:
    """Cast to the dtype that `half_precision_datatype` returns."""
    return _policy.cast_tree(x, half_precision_datatype())


def cast_to_full_precision(x: T) -> T:
    """Cast to float32."""
    return _policy.cast_to_full_precision(x)


def cast_to_float16(x: T) -> T:
    """Cast to float16."""
    return _policy.cast_to_float16(x)


def cast_to_bfloat16(x: T) -> T:
    """Cast to bfloat16."""
    return _policy.cast_to_bfloat16(x)


def cast_to_float32(x: T) -> T:
    """Cast to float32."""
    return _policy.cast_to_float32(x)


def cast_function(
    func: Callable[..., T], dtype: DTypeLike, return_dtype: DTypeLike | None = None
) -> Callable[..., T]:
    """Cast the arguments of a function and any pytree that it returns.

    Args:
        func: Any function of pytrees.
        dtype: The dtype to cast floating-point arguments to.
        return_dtype: The dtype to cast results to; `None` means `dtype`.
    """
    return _policy.cast_function(func, dtype, dtype if return_dtype is None else return_dtype)


def force_full_precision(
    func: Callable[..., T], return_dtype: DTypeLike | None = None
) -> Callable[..., T]:
    """Run a function or an Equinox module in float32 and cast any pytree it returns.

    Args:
        func: The function or module.
        return_dtype: The dtype to cast results to; `None` means the dtype that the arguments had
            (mpx's default is float16, in bfloat16 mode too).
    """
    return _policy.force_full_precision(func, return_dtype)


class DynamicLossScaling(_training.DynamicLossScaling):
    """halfstep's loss scaling with mpx's constructor and limits.

    Args:
        loss_scaling: The initial scale, rounded down to a power of two that is at most 2**15:
            `FLOAT16_MAX` gives 32768.
        min_loss_scaling: The floor, rounded down to a power of two.
        factor: The factor by which the scale grows and shrinks, a power of two.
        period: Good steps in a row before the scale grows.
        counter: Good steps so far, to continue a run.
    """

    def __init__(
        self,
        loss_scaling: Any,
        min_loss_scaling: Any,
        factor: int = 2,
        period: int = 2000,
        counter: Any = None,
    ):
        super().__init__(
            min(power_of_two_below(loss_scaling, "loss_scaling"), _CEILING),
            power_of_two_below(min_loss_scaling, "min_loss_scaling"),
            _CEILING,
            period=period,
            factor=factor,
        )
        if counter is not None:
            self.counter = jnp.asarray(counter, jnp.int32)


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Return whether every floating-point or complex number in a pytree is finite."""
    return _training.all_finite(tree)


def select_tree(pred: Any, a: T, b: T) -> T:
    """Return the arrays of `a` if `pred`, else those of `b`; other leaves are taken from `a`."""
    # halfstep's `select_tree` refuses leaves that differ and are not arrays; mpx takes those of
    # `a`.
    arrays, others = eqx.partition(a, is_array)
    return eqx.combine(_training.select_tree(pred, arrays, eqx.filter(b, is_array)), others)


def scaled(
    func: Callable[..., Any], scaling: _training.AbstractLossScaling, has_aux: bool = False
) -> Callable[..., Any]:
    """Scale the result of a function; with `has_aux`, the first of its two results."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not has_aux:
            return scaling.scale(result)
        value, aux = result
        return scaling.scale(value), aux

    return wrapper


def calculate_scaled_grad(
    func: Callable[..., Any],
    scaling: _training.AbstractLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., Any]:
    """Compute a value and its gradients, which stay scaled and in half precision.

    Args:
        func: A function that returns a scalar loss, or `(loss, aux)` with `has_aux`.
        scaling: The loss scaling.
        has_aux: Whether `func` returns an auxiliary output.
        use_mixed_precision: If false, nothing is cast and nothing is scaled.

    Returns:
        A function of the same arguments that returns what `eqx.filter_value_and_grad` would.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        differentiated = func
        if use_mixed_precision:
            half = half_precision_datatype()
            args, kwargs = _policy.cast_arguments(func, args, kwargs, half)
            differentiated = scaled(func, scaling, has_aux)
        return eqx.filter_value_and_grad(differentiated, has_aux=has_aux)(*args, **kwargs)

    return wrapper


def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: _training.AbstractLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., tuple[Any, ...]]:
    """Compute a value and its gradients in mixed precision.

    Args:
        func: A function that returns a scalar loss, or `(loss, aux)` with `has_aux`.
        scaling: The loss scaling.
        has_aux: Whether `func` returns an auxiliary output. It is returned in the dtypes that
            `func` gives it without mixed precision.
        use_mixed_precision: If false, nothing is cast, nothing is scaled and `scaling` is returned
            as it is. Gradients are still checked for finiteness.

    Returns:
        A function of the same arguments that returns `(value, scaling, grads_finite, grads)`,
        where `value` is `(loss, aux)` with `has_aux` and `grads_finite` a boolean array.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        # The policy is made here and not outside, so that the call decides what "half" means.
        if use_mixed_precision:
            options: Any = {"policy": Policy(compute=half_precision_datatype(), mode="inputs")}
            applied = scaling
        else:
            # Everything is kept as it is given: mpx casts nothing here, while the policy f32 casts
            # inputs of 16 bits.
            options = {"policy": "f32", "keep": ("**",)}
            applied = _training.NoLossScaling()
        transform = _training.filter_value_and_grad(
            func, applied, has_aux=has_aux, check_finite=True, **options
        )
        value, _, verdict, grads = transform(*args, **kwargs)
        # mpx checks only the gradients, while a verdict also checks the loss.
        grads_finite = verdict.first_leaf < 0
        adjusted = scaling.adjust(grads_finite) if use_mixed_precision else scaling
        return value, adjusted, grads_finite, grads

    return wrapper


def filter_grad(
    func: Callable[..., Any],
    scaling: _training.AbstractLossScaling,
    has_aux: bool = False,
    use_mixed_precision: bool = True,
) -> Callable[..., tuple[Any, ...]]:
    """Compute gradients in mixed precision, and return them in float32 or wider.

    Args:
        func: A function that returns a scalar loss, or `(loss, aux)` with `has_aux`.
        scaling: The loss scaling.
        has_aux: Whether `func` returns an auxiliary output.
        use_mixed_precision: As in `filter_value_and_grad`.

    Returns:
        A function of the same arguments that returns `(scaling, grads_finite, grads)`, or
        `(scaling, grads_finite, grads, aux)` with `has_aux`.
    """
    with_value = filter_value_and_grad(func, scaling, has_aux, use_mixed_precision)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        value, adjusted, grads_finite, grads = with_value(*args, **kwargs)
        result = (adjusted, grads_finite, cast_to_full_precision(grads))
        return (*result, value[1]) if has_aux else result

    return wrapper


def optimizer_update(
    model: T,
    optimizer: optax.GradientTransformation,
    optimizer_state: Any,
    grads: Any,
    grads_finite: Any,
    **extra_args: Any,
) -> tuple[T, Any]:
    """Apply an optimizer's step if the gradients are finite, else leave everything unchanged.

    Args:
        model: Any pytree; its inexact arrays are trained.
        optimizer: Any Optax optimizer.
        optimizer_state: The state of the optimizer.
        grads: Gradients.
        grads_finite: A boolean scalar.
        **extra_args: Passed to `optimizer.update`, unlike in mpx.
    """
    return _training.optimizer_update(
        model, optimizer, optimizer_state, grads, grads_finite, **extra_args
    )
