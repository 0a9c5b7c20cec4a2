"""Provide jaxamp 0.0.4's names: `import halfstep.compat.jaxamp as jaxamp` is the whole migration.

`amp` is halfstep's autocast, which has jaxamp's precision functions as rules. The scaler's state is
a named tuple, as in jaxamp. Mistakes of jaxamp are corrected here; the migration guide lists each
difference.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import Array

from halfstep import _program, _training
from halfstep._autocast import CONTRACTIONS, rewritten, settings_of
from halfstep._base import DTypeLike, at_least_float32, varying_axes
from halfstep._policy import (
    Operation,
    Policy,
    PrecisionFunction,
    PrecisionRule,
    cast_tree,
    is_castable,
)
from halfstep._training import multiplied, vary
from halfstep.compat._scale import CEILING

__all__ = (
    "DynamicLossScaler",
    "DynamicScalerState",
    "amp",
    "amp_stop",
    "default_amp_policy",
    "dynamic_scale_grad",
    "dynamic_scale_tx",
    "dynamic_scale_value_and_grad",
    "use_compute_precision",
    "use_original_precision",
)


def __dir__() -> list[str]:
    return sorted(__all__)


T = TypeVar("T")
AmpPolicy = Mapping[Any, PrecisionFunction]
"""Precision functions by primitive, or by the name of a `jax.named_scope`."""

_STOP, _DEFAULT = "amp_stop", "amp_default"
# Loops, branches and calls. They have no precision of their own, so that an entry for "everything
# else" is for the operations inside them.
_CALLS = frozenset(
    name
    for kind in (
        *(_program.Cond, _program.While, _program.Scan, _program.Jit, _program.Remat),
        *(_program.ShardMap, _program.CustomJvp, _program.CustomVjp, _program.CustomVmap),
    )
    for name in kind.names
)


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


def _use_table(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    # As the entry "amp_default" this function stands for the table of `halfstep.autocast`, which no
    # function of one operation's operands can express. Everywhere else it is what jaxamp has there.
    return use_original_precision(compute_dtype, original_dtypes, *invars, **bind_params)


# Precision functions that stand for one of halfstep's outcomes are replaced by it. An outcome knows
# more than a function of operands can: gradients of parameters add up in float32, and whole loops
# can be left as they are written.
def _outcome(function: PrecisionFunction) -> Any:
    if function is use_compute_precision:
        return "compute"
    return "float32" if function in (use_original_precision, _use_table) else function


_STOPS = MappingProxyType(dict.fromkeys((_STOP, "amp_step"), use_original_precision))
default_amp_policy: MappingProxyType[Any, PrecisionFunction] = MappingProxyType(
    {
        jax.lax.dot_general_p: use_compute_precision,
        jax.lax.conv_general_dilated_p: use_compute_precision,
        **_STOPS,
        _DEFAULT: _use_table,
    }
)
"""Contractions in the compute dtype, and the scopes that stop `amp`. The table of
`halfstep.autocast` decides everything else. Add entries by `default_amp_policy | {...}`."""


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
        amp_policy: Which operations run in which precision. Keys are JAX's primitives
            (`jax.lax.add_p`), or the names of `jax.named_scope`s. The outermost active scope wins,
            and any scope comes before a primitive. Values are functions
            `(compute_dtype, original_dtypes, *invars, **bind_params) -> (invars, bind_params)`. The
            entry `"amp_default"` is for operations that no other entry is for; without it, they run
            in their original precision, contractions included. `default_amp_policy | {...}` adds
            entries to the default. An entry that matches nothing in `fun` is not an error. The
            scopes `"amp_stop"` and `"amp_step"` stop `amp` unless their entries are replaced.

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
    entries = {**_STOPS, _DEFAULT: use_original_precision, **amp_policy}
    by_table = entries[_DEFAULT] is _use_table
    scopes = tuple(key for key in entries if isinstance(key, str))
    named: set[str] = set()
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
        named.add(name or "")
        if by_table and name in CONTRACTIONS and function is use_compute_precision:
            continue  # The table says so, and knows exceptions, such as a product with a mask.
        scope = key if isinstance(key, str) else None
        where = _Entry(scope, scopes, function is use_compute_precision)
        yield PrecisionRule(_outcome(function), op=name, where=where)
    # The first rule that matches is used, so these are for operations without an entry.
    if not by_table:
        yield PrecisionRule(_outcome(entries[_DEFAULT]), where=_is_no_call)
        return
    # JAX has no public names for ragged products; they go with all other products.
    ragged = CONTRACTIONS - {"dot_general", "conv_general_dilated"}
    for name in CONTRACTIONS - named - (ragged if "dot_general" in named else set()):
        yield PrecisionRule("float32", op=name)


def _is_no_call(operation: Operation) -> bool:
    return operation.primitive not in _CALLS


# Loss scaling.


class DynamicScalerState(NamedTuple):
    """The state of a dynamic loss scaler, a named tuple of numbers.

    Attributes:
        patience: The scaler grows in the step after so many good steps in a row.
        adjust_factor: The factor by which the scaler grows and shrinks.
        scaler: The current scaler. It stays between 1, or its initial value if that is smaller, and
            2**126. Powers of two scale without rounding.
        count: Good steps since the scaler last changed.
        total_resets: Steps so far that were not finite.
    """

    # NumPy's numbers: JAX's would start its backend when this module is imported, and Python's
    # would be weakly typed, so that the second step would be compiled again.
    patience: Any = np.int32(2000)
    adjust_factor: Any = np.float32(2.0)
    scaler: Any = np.float32(2.0**15)
    count: Any = np.int32(0)  # pyright: ignore[reportIncompatibleMethodOverride]
    total_resets: Any = np.int32(0)


DynamicLossScaler = DynamicScalerState
"""The name of `DynamicScalerState` in the first example of jaxamp's README."""


def _checked(state: object) -> DynamicScalerState:
    """Return a state with arrays of the dtypes that the next state has."""
    if not isinstance(state, DynamicScalerState):
        raise TypeError(
            "`dynamic_scaler_state` must be a DynamicScalerState, given by name; got "
            f"{type(state).__name__}. Pass the one of the last step, and DynamicScalerState() to "
            "the first."
        )
    patience, factor, scaler, count, resets = state
    # Numbers of the host only: to read an array would wait for the device in every step.
    if _is_number(patience) and (patience != int(patience) or patience < 0):
        raise ValueError(f"`patience` must be an integer, 0 or more; got {patience}.")
    if _is_number(factor) and not factor > 1:
        raise ValueError(f"`adjust_factor` must be above 1; got {factor}.")
    if _is_number(scaler) and not 0 < scaler < math.inf:
        raise ValueError(f"`scaler` must be a finite number above 0; got {scaler}.")
    given = getattr(scaler, "dtype", np.dtype(np.float32))
    wide = at_least_float32(given) if jnp.issubdtype(given, jnp.floating) else np.float32
    return DynamicScalerState(
        jnp.asarray(patience, jnp.int32),
        jnp.asarray(factor, wide),
        jnp.asarray(scaler, wide),
        jnp.asarray(count, jnp.int32),
        jnp.asarray(resets, jnp.int32),
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)


def _adjusted(state: DynamicScalerState, finite: Array) -> DynamicScalerState:
    """Return the state for the next step."""
    grow = finite & (state.count >= state.patience)
    scaler, factor = state.scaler, state.adjust_factor
    # Without limits the scaler could become 0 or infinite, and would stay so.
    grown = jnp.minimum(scaler * factor, CEILING)
    shrunk = jnp.maximum(scaler / factor, jnp.minimum(scaler, 1.0))
    return state._replace(
        scaler=jnp.where(finite, jnp.where(grow, grown, scaler), shrunk),
        count=jnp.where(finite & ~grow, state.count + 1, 0),
        total_resets=state.total_resets + jnp.where(finite, 0, 1),
    )


def _scaled(result: Any, state: DynamicScalerState) -> Any:
    """Scale a function's result; of `(value, aux)`, the value."""
    if isinstance(result, tuple) and len(result) == 2:
        return multiplied(result[0], state.scaler), result[1]
    return multiplied(result, state.scaler)


def _unscaled(results: Any, state: DynamicScalerState) -> Any:
    """Unscale everything that a transformation returns."""
    return multiplied(results, 1.0 / state.scaler)


def _count(redo_on_nan: int) -> int:
    if redo_on_nan != int(redo_on_nan) or redo_on_nan < 0:
        raise ValueError(f"`redo_on_nan` is an integer, 0 or more; got {redo_on_nan}.")
    return int(redo_on_nan)


def dynamic_scale_tx(
    transform: Callable[..., Any],
    redo_on_nan: int = 0,
    unscale_fn: Callable[[Any, Any], Any] = _unscaled,
    scale_fn: Callable[[Any, Any], Any] = _scaled,
) -> Callable[..., Callable[..., tuple[Any, Any]]]:
    """Apply a dynamic loss scaler to any transformation of functions, such as `jax.jacrev`.

    Args:
        transform: The transformation: a function of a function and of other arguments that returns
            a function. Its results must be linear in the function's result.
        redo_on_nan: How often results that are not finite are recomputed, each time with the scaler
            that the last attempt has left.
        unscale_fn: A function `(results, state) -> results` of the transformed function's results
            and a `DynamicScalerState`. The default divides every inexact leaf by the scaler, an
            auxiliary output included.
        scale_fn: A function `(result, state) -> result` of the original function's result. The
            default multiplies its inexact leaves by the scaler; of a tuple `(value, aux)`, those of
            the value.

    Returns:
        A function of a function and of the other arguments of `transform`. It returns a function of
        the same arguments and of `dynamic_scaler_state`, by name, that returns
        `(dynamic_scaler_state, results)`.
    """
    limit = _count(redo_on_nan)

    def scaled_transform(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        def attempt(
            state: DynamicScalerState, given: tuple[Any, ...], kwds: dict[str, Any]
        ) -> tuple[DynamicScalerState, Array, Any]:
            @functools.wraps(fun)
            def scaled(*given: Any, **kwds: Any) -> Any:
                return scale_fn(fun(*given, **kwds), state)

            results = unscale_fn(transform(scaled, *args, **kwargs)(*given, **kwds), state)
            finite = _training.all_finite(results)
            return _adjusted(state, finite), ~finite, results

        return _attempted(attempt, fun, limit)

    return scaled_transform


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
    limit = _count(redo_on_nan)
    transform: Callable[..., Any] = eqx.filter_value_and_grad if filter else jax.value_and_grad

    def attempt(
        state: DynamicScalerState, args: tuple[Any, ...], kwds: dict[str, Any]
    ) -> tuple[DynamicScalerState, Array, Any]:
        def scaled(*args: Any, **kwds: Any) -> tuple[Any, Any]:
            result = fun(*args, **kwds)
            loss, _ = result if has_aux else (result, None)
            return multiplied(loss, state.scaler), result

        # The result is passed through as auxiliary output, so that the returned value was never
        # scaled.
        (_, result), grads = transform(scaled, has_aux=True, **kwargs)(*args, **kwds)
        grads = _unscaled(grads, state)
        loss_finite = _training.all_finite(result[0] if has_aux else result)
        finite = loss_finite & _training.all_finite(grads)
        # The attempt is repeated only if the loss is finite and gradients are not: a smaller scale
        # helps only against an overflow in the backward pass.
        return _adjusted(state, finite), loss_finite & ~finite, (result, grads)

    return _attempted(attempt, fun, limit)


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


def _attempted(
    attempt: Callable[..., tuple[DynamicScalerState, Array, Any]],
    fun: Callable[..., Any],
    redo_on_nan: int,
) -> Callable[..., tuple[DynamicScalerState, Any]]:
    """Return a function of the state, by name, and of `fun`'s arguments."""

    @functools.wraps(fun)
    def attempted(
        *args: Any, dynamic_scaler_state: object = None, **kwds: Any
    ) -> tuple[DynamicScalerState, Any]:
        state = _checked(dynamic_scaler_state)
        if not redo_on_nan:
            state, _, results = attempt(state, args, kwds)
            return state, results
        return _repeated(attempt, state, (args, kwds), redo_on_nan + 1)

    # The signature is not that of `fun`: it has one more argument.
    del attempted.__wrapped__
    return attempted


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
