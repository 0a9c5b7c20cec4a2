"""Provide jaxamp 0.0.4's names: `import halfstep.compat.jaxamp as jaxamp` is the whole migration.

`amp` is halfstep's autocast, which has jaxamp's precision functions as rules. The scaler's state is
halfstep's loss scaling with jaxamp's constructor, so `halfstep.filter_grad` takes it as well.
Mistakes of jaxamp are corrected here; the migration guide lists each difference.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jaxtyping import Array

from halfstep import _training
from halfstep._autocast import rewritten, settings_of
from halfstep._base import DTypeLike, varying_axes
from halfstep._policy import (
    Operation,
    Policy,
    PrecisionFunction,
    PrecisionRule,
    cast_tree,
    is_castable,
)
from halfstep._training import vary
from halfstep.compat._scale import CEILING, power_of_two_below

__all__ = (
    "DynamicLossScaler",
    "DynamicScalerState",
    "amp",
    "amp_stop",
    "default_amp_policy",
    "dynamic_scale_grad",
    "dynamic_scale_value_and_grad",
    "use_compute_precision",
    "use_original_precision",
)


def __dir__() -> list[str]:
    return sorted(__all__)


T = TypeVar("T")
AmpPolicy = Mapping[Any, PrecisionFunction]
"""Precision functions by primitive, or by the name of a `jax.named_scope`."""

_Scaling = _training.AbstractLossScaling
_STOP = "amp_stop"


# Precision functions.


def use_compute_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Run an operation in the compute dtype.

    An operation that takes anything but floating-point numbers (indices, complex numbers, keys) is
    left as it is.

    Args:
        compute_dtype: The compute dtype of `amp`.
        original_dtypes: The dtypes of the operands without `amp`.
        *invars: The operands.
        **bind_params: The other parameters that the primitive is bound with.

    Returns:
        The operands and the parameters to bind the operation with.
    """
    if not all(map(is_castable, invars)):
        return invars, bind_params
    if "preferred_element_type" in bind_params:
        bind_params = {**bind_params, "preferred_element_type": compute_dtype}
    return cast_tree(invars, compute_dtype), bind_params


def use_original_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Run an operation in the dtypes in which it is written.

    Args:
        compute_dtype: The compute dtype of `amp`.
        original_dtypes: The dtypes of the operands without `amp`.
        *invars: The operands.
        **bind_params: The other parameters that the primitive is bound with.

    Returns:
        The operands and the parameters to bind the operation with.
    """
    pairs = zip(invars, original_dtypes, strict=True)
    return tuple(cast_tree(x, dtype) if is_castable(x) else x for x, dtype in pairs), bind_params


# Precision functions that stand for one of halfstep's outcomes are replaced by it. An outcome knows
# more than a function of operands can: gradients of parameters add up in float32, and whole loops
# can be left as they are written.
def _outcome(function: PrecisionFunction) -> Any:
    if function is use_compute_precision:
        return "compute"
    return "float32" if function is use_original_precision else function


default_amp_policy: AmpPolicy = MappingProxyType(
    dict.fromkeys((_STOP, "amp_step", "amp_default"), use_original_precision)
)
"""The scopes that stop `amp`. The table of `halfstep.autocast` decides everything else."""


# Policies.


def amp(
    fun: Callable[..., Any] | None = None,
    *,
    compute_dtype: DTypeLike = jnp.float16,
    amp_policy: AmpPolicy = default_amp_policy,
) -> Callable[..., Any]:
    """Run a function's operations in the precision that suits each, by `halfstep.autocast`.

    Args:
        fun: Any function that can be traced; its first argument holds the parameters. Without it, a
            decorator is returned.
        compute_dtype: The low-precision dtype.
        amp_policy: Differences from the table of `halfstep.autocast`. Keys are JAX's primitives
            (`jax.lax.add_p`), or the names of `jax.named_scope`s. The outermost active scope wins,
            and any scope comes before a primitive. Values are functions
            `(compute_dtype, original_dtypes, *invars, **bind_params) -> (invars, bind_params)`. An
            entry that matches nothing in `fun` is not an error. The entries of
            `default_amp_policy` apply unless they are replaced.

    Returns:
        A function of the same arguments. Its results have the dtypes that they have without `amp`.

    Raises:
        TypeError: If `amp_policy` has an entry of another kind.
        ValueError: When called, if an entry is for a loop or a call, which has no precision.
    """
    if fun is None:
        return functools.partial(amp, compute_dtype=compute_dtype, amp_policy=amp_policy)
    # `every_rule=False`, because a policy of jaxamp is written once for many functions. A rule of
    # halfstep's own that matches nothing is an error.
    policy = Policy(compute=compute_dtype, rules=tuple(_rules(amp_policy)))
    return rewritten(fun, settings_of(policy), params={0}, every_rule=False)


def amp_stop(f: Any = None) -> Any:
    """Leave a function, or the body of a `with`, as it is written, whatever `amp` does.

    This uses the scope `jax.named_scope("amp_stop")`.

    Args:
        f: The function. Without it, the scope is returned as a context manager.
    """
    if f is None:
        return jax.named_scope(_STOP)

    @functools.wraps(f)
    def stopped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(_STOP):
            return f(*args, **kwargs)

    return stopped


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A predicate of operations: whether an entry of a policy is for an operation."""

    scope: str | None
    """The scope of the entry; `None` if it is for a primitive."""
    scopes: tuple[str, ...]
    """All scopes of the policy."""
    floats_only: bool

    @property
    def __name__(self) -> str:
        return f"in {self.scope}" if self.scope else "in no scope of the policy"

    def __call__(self, operation: Operation) -> bool:
        if _outermost(operation.scope, self.scopes) != self.scope:
            return False
        dtypes = [operand.dtype for operand in operation.ins]
        inexact = bool(dtypes) and all(jnp.issubdtype(d, jnp.floating) for d in dtypes)
        return inexact or not self.floats_only


def _outermost(scope: str, names: Sequence[str]) -> str | None:
    """Return the name of the scope that is active on the outermost level."""
    active = scope.split("/")
    # A name may itself contain slashes, `"block/attention"`, and then ends at a level.
    for level in range(1, len(active) + 1):
        for name in names:
            wanted = name.split("/")
            if active[max(0, level - len(wanted)) : level] == wanted:
                return name
    return None


def _rules(amp_policy: Mapping[Any, Any]) -> Iterator[PrecisionRule]:
    entries = {**default_amp_policy, **amp_policy}
    scopes = tuple(key for key in entries if isinstance(key, str))
    for key, function in entries.items():
        if not isinstance(key, str | Primitive):
            raise TypeError(
                "a key of `amp_policy` is a primitive such as jax.lax.add_p, or the name of a "
                f"jax.named_scope; got {key!r}."
            )
        if not callable(function):
            raise TypeError(
                "a value of `amp_policy` is a function (compute_dtype, original_dtypes, *invars, "
                f"**bind_params) -> (invars, bind_params); got {function!r} for {key!r}."
            )
        name = None if isinstance(key, str) else key.name
        scope = key if isinstance(key, str) else None
        where = _Entry(scope, scopes, function is use_compute_precision)
        yield PrecisionRule(_outcome(function), op=name, where=where)


# Loss scaling.


class DynamicScalerState(_training.DynamicLossScaling):
    """halfstep's `DynamicLossScaling` with jaxamp's constructor.

    Args:
        patience: Good steps in a row before the scaler grows.
        adjust_factor: The factor by which the scaler grows and shrinks, a power of two.
        scaler: The initial scale, rounded down to a power of two. The scale never falls below 1, or
            below its initial value if that is smaller.
        count: Good steps so far, to continue a run.
    """

    def __init__(
        self, patience: Any = 2000, adjust_factor: Any = 2.0, scaler: Any = 2.0**15, count: Any = 0
    ):
        initial = _training.power_of_two(power_of_two_below(scaler, "scaler"), "scaler")
        if patience != int(patience) or patience < 1:
            raise ValueError(f"`patience` must be an integer, 1 or more; got {patience}.")
        super().__init__(
            initial,
            min(1.0, initial),
            CEILING,
            period=int(patience),
            factor=_training.power_of_two(adjust_factor, "adjust_factor"),
        )
        # jaxamp counts one step further before the scaler grows, so that one of its states may have
        # reached its patience.
        self.counter = jnp.asarray(min(int(count), self.period - 1), jnp.int32)

    @property
    def patience(self) -> int:
        """Good steps in a row before the scaler grows."""
        return self.period

    @property
    def adjust_factor(self) -> float:
        """The factor by which the scaler grows and shrinks."""
        return self.factor

    @property
    def scaler(self) -> Array:
        """The scale, in float32."""
        return self.loss_scaling

    @property
    def count(self) -> Array:
        """Good steps since the scaler last changed."""
        return self.counter


DynamicLossScaler = DynamicScalerState
"""The name of `DynamicScalerState` in the first example of jaxamp's README."""


def dynamic_scale_value_and_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    **kwargs: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Compute a value and its gradients with a dynamic loss scaler.

    Args:
        fun: A function that returns a scalar loss, or `(loss, aux)` with `has_aux`.
        has_aux: Whether `fun` returns an auxiliary output. It does not affect whether a step is
            good.
        redo_on_nan: How often gradients that are not finite are recomputed, each time with the
            scaler that the last attempt has left. The result of the last attempt is returned,
            finite or not. If the loss itself is not finite, no other scaler changes it, and nothing
            is recomputed.
        filter: Whether to differentiate with respect to the inexact arrays of the first argument,
            as `eqx.filter_value_and_grad` does. If false, `jax.value_and_grad` is used.
        **kwargs: Passed to `jax.value_and_grad`, such as `argnums=1`.

    Returns:
        A function of the same arguments and of `dynamic_scaler_state`, by name, that returns
        `(dynamic_scaler_state, (value, grads))`, where `value` is `(loss, aux)` with `has_aux`.
        Gradients are unscaled, in float32 or wider.
    """
    if redo_on_nan != int(redo_on_nan) or redo_on_nan < 0:
        raise ValueError(f"`redo_on_nan` is an integer, 0 or more; got {redo_on_nan}.")
    transform: Callable[..., Any] = eqx.filter_value_and_grad if filter else jax.value_and_grad

    def attempt(
        state: _Scaling, args: tuple[Any, ...], kwds: dict[str, Any]
    ) -> tuple[_Scaling, Array, Any]:
        def scaled(*args: Any, **kwds: Any) -> tuple[Any, Any]:
            result = fun(*args, **kwds)
            loss, _ = result if has_aux else (result, None)
            return state.scale(loss), result

        # The result is passed through as auxiliary output, so that the returned value was never
        # scaled.
        (_, result), grads = transform(scaled, has_aux=True, **kwargs)(*args, **kwds)
        grads = state.unscale(grads)
        loss_finite = _training.all_finite(result[0] if has_aux else result)
        finite = loss_finite & _training.all_finite(grads)
        # The attempt is repeated only if the loss is finite and gradients are not: a smaller scale
        # helps only against an overflow in the backward pass.
        return state.adjust(finite), loss_finite & ~finite, (result, grads)

    @functools.wraps(fun)
    def value_and_grad(
        *args: Any, dynamic_scaler_state: _Scaling | None = None, **kwds: Any
    ) -> tuple[_Scaling, Any]:
        if not isinstance(dynamic_scaler_state, _training.AbstractLossScaling):
            raise TypeError(
                "`dynamic_scaler_state` must be a DynamicScalerState, given by name; got "
                f"{type(dynamic_scaler_state).__name__}. Pass the one of the last step, and "
                "DynamicScalerState() to the first."
            )
        if not redo_on_nan:
            state, _, result = attempt(dynamic_scaler_state, args, kwds)
            return state, result
        return _repeated(attempt, dynamic_scaler_state, (args, kwds), int(redo_on_nan) + 1)

    # The signature is not that of `fun`: it has one more argument.
    del value_and_grad.__wrapped__
    return value_and_grad


def dynamic_scale_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    **kwargs: Any,
) -> Callable[..., tuple[Any, Any]]:
    """Compute gradients with a dynamic loss scaler.

    Args:
        fun: A function that returns a scalar loss, or `(loss, aux)` with `has_aux`.
        has_aux: Whether `fun` returns an auxiliary output.
        redo_on_nan: As in `dynamic_scale_value_and_grad`.
        filter: As in `dynamic_scale_value_and_grad`.
        **kwargs: Passed to `jax.value_and_grad`, such as `argnums=1`.

    Returns:
        A function of the same arguments and of `dynamic_scaler_state`, by name, that returns
        `(dynamic_scaler_state, grads)`, or `(dynamic_scaler_state, (grads, aux))` with `has_aux`.
    """
    with_value = dynamic_scale_value_and_grad(
        fun, has_aux=has_aux, redo_on_nan=redo_on_nan, filter=filter, **kwargs
    )

    @functools.wraps(with_value)
    def grad(*args: Any, **kwds: Any) -> tuple[Any, Any]:
        state, (value, grads) = with_value(*args, **kwds)
        return state, (grads, value[1]) if has_aux else grads

    return grad


def _repeated(
    attempt: Callable[..., tuple[T, Array, Any]], state: T, call: tuple[Any, ...], limit: int
) -> tuple[T, Any]:
    """Attempt a call until it need not be repeated, at most `limit` times. It is compiled once."""
    # Arrays are passed as arguments and not closed over: otherwise they would be written into the
    # program.
    given, static = eqx.partition(call, eqx.is_array)
    # A loop can carry only arrays. The other results are the same in every attempt, and are kept
    # aside while tracing.
    others: list[Any] = []

    @jax.jit
    def once(state: T, given: tuple[Any, ...]) -> tuple[T, Array, Any]:
        state, again, result = attempt(state, *eqx.combine(given, static))
        arrays, rest = eqx.partition(result, eqx.is_array)
        others[:] = [rest]
        return state, again, arrays

    def body(carry: tuple[T, Array, Array, Any]) -> tuple[T, Array, Array, Any]:
        state, number, _, _ = carry
        state, again, arrays = once(state, given)
        return state, number + 1, again, arrays

    state = jtu.tree_map(jnp.asarray, state)
    # The carry needs a first value of the right types, which no attempt has made yet.
    _, _, shapes = jax.eval_shape(once, state, given)
    blank = jtu.tree_map(_blank, shapes)
    state, _, _, arrays = jax.lax.while_loop(
        lambda carry: carry[2] & (carry[1] < limit),
        body,
        (state, jnp.int32(0), jnp.bool_(True), blank),
    )
    return state, eqx.combine(arrays, *others)


def _blank(like: jax.ShapeDtypeStruct) -> Array:
    # Inside `shard_map`, the carry must also vary over the same axes as the value that replaces it.
    return vary(jax.lax.full(like.shape, 0, like.dtype), tuple(varying_axes(like)))
