"""Provide the names of flashoptim-jax on top of `halfstep.optim`.

Change the import and keep the rest:

```python
from halfstep.compat.flashoptim_jax import flash_adamw, flash_lion, flash_sgdw
```

Some things differ. Scales are bfloat16 and belong to rows, not float16 and flat runs, so that small
and large gradients survive, one outlier does not move its neighbors, and leaves can be sharded.
Weights are split by their bits, which is exact for 32 bits. Leaves of fewer than 4096 elements keep
float32 moments. The optimizers are also Optax optimizers, and run on CPUs, GPUs and TPUs. States of
the two libraries are not exchangeable: `reconstruct_weights` there and `set_fp32_params` here carry
parameters over.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from halfstep._training import Verdict
from halfstep.optim import FlashState
from halfstep.optim._flash import FlashRule, flash
from halfstep.optim._layout import StateOptions, options_of
from halfstep.optim._transform import Transformation
from halfstep.quant import Groups, Quantized, dequantize, join, quantize, split

__all__ = (
    "FlashAdamState",
    "FlashLionState",
    "FlashOptimizer",
    "FlashSGDState",
    "QuantizedArray",
    "cast_tree_bf16",
    "dequantize_momentum",
    "dequantize_variance",
    "flash_adam",
    "flash_adamw",
    "flash_adamw_state_dict",
    "flash_lion",
    "flash_lion_state_dict",
    "flash_sgd",
    "flash_sgd_state_dict",
    "flash_sgdw",
    "load_flash_adamw_state_dict",
    "load_flash_lion_state_dict",
    "load_flash_sgd_state_dict",
    "quantize_momentum",
    "quantize_variance",
    "reconstruct_leaf",
    "reconstruct_weights",
    "set_fp32_params",
    "split_leaf",
)


def __dir__() -> list[str]:
    return sorted(__all__)


# More elements than any leaf has. As the smallest size to compress, it turns compression off.
_EVERYTHING = 1 << 62
_T = TypeVar("_T")


class FlashAdamState(NamedTuple):
    """The state of `flash_adam` and `flash_adamw`."""

    count: Any  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Any
    nu: Any
    ecc: Any


class FlashLionState(NamedTuple):
    """The state of `flash_lion`."""

    count: Any  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Any
    ecc: Any


class FlashSGDState(NamedTuple):
    """The state of `flash_sgd` and `flash_sgdw`."""

    count: Any  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Any
    ecc: Any


_State = FlashAdamState | FlashLionState | FlashSGDState


class FlashOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer with `init` and `step`, and with `update`, as Optax needs it."""

    step: Callable[..., tuple[Any, Any]]


def flash_adamw(
    learning_rate: Any = 1e-3,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 1e-2,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Any = None,
    inplace: bool = True,
) -> FlashOptimizer:
    """Make AdamW with decoupled weight decay; see `halfstep.optim.flash_adamw`."""
    options = _options(quantize, master_weight_bits, group_size, fused, param_groups, inplace)
    rule = FlashRule(
        "adam", learning_rate, b1=b1, b2=b2, eps=eps, decay=weight_decay, moments=(True, True)
    )
    return _wrapped(flash(rule, options), FlashAdamState)


def flash_adam(
    learning_rate: Any = 1e-3,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Any = 0.0,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Any = None,
    inplace: bool = True,
) -> FlashOptimizer:
    """Make Adam, with weight decay as a part of the gradient."""
    options = _options(quantize, master_weight_bits, group_size, fused, param_groups, inplace)
    rule = FlashRule(
        "adam",
        learning_rate,
        b1=b1,
        b2=b2,
        eps=eps,
        decay=weight_decay,
        moments=(True, True),
        coupled=True,
    )
    return _wrapped(flash(rule, options), FlashAdamState)


def flash_lion(
    learning_rate: Any = 1e-4,
    b1: Any = 0.9,
    b2: Any = 0.99,
    weight_decay: Any = 0.0,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Any = None,
    inplace: bool = True,
) -> FlashOptimizer:
    """Make Lion; see `halfstep.optim.flash_lion`."""
    options = _options(quantize, master_weight_bits, group_size, fused, param_groups, inplace)
    rule = FlashRule("lion", learning_rate, b1=b1, b2=b2, decay=weight_decay, moments=(True, False))
    return _wrapped(flash(rule, options), FlashLionState)


def flash_sgd(
    learning_rate: Any = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: Any = 0.0,
    nesterov: bool = False,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Any = None,
    inplace: bool = True,
) -> FlashOptimizer:
    """Make gradient descent, with weight decay as a part of the gradient."""
    options = _options(quantize, master_weight_bits, group_size, fused, param_groups, inplace)
    return _sgd(learning_rate, momentum, dampening, weight_decay, nesterov, True, options)


def flash_sgdw(
    learning_rate: Any = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: Any = 0.0,
    nesterov: bool = False,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: Any = None,
    inplace: bool = True,
) -> FlashOptimizer:
    """Make gradient descent with decoupled weight decay; see `halfstep.optim.flash_sgd`."""
    options = _options(quantize, master_weight_bits, group_size, fused, param_groups, inplace)
    return _sgd(learning_rate, momentum, dampening, weight_decay, nesterov, False, options)


def _sgd(
    rate: ArrayLike | optax.Schedule,
    momentum: float,
    dampening: float,
    decay: ArrayLike,
    nesterov: bool,
    coupled: bool,
    options: StateOptions,
) -> FlashOptimizer:
    if dampening:
        raise ValueError(f"dampening must be 0; got {dampening}. Use a smaller learning rate.")
    rule = FlashRule(
        "sgd",
        rate,
        b1=momentum,
        decay=decay,
        moments=(bool(momentum), False),
        nesterov=nesterov,
        coupled=coupled,
    )
    return _wrapped(flash(rule, options), FlashSGDState)


def _options(
    quantize: bool,
    master_bits: int | None,
    group_size: int,
    fused: bool,
    param_groups: Any,
    inplace: bool,
) -> StateOptions:
    # Whether parameters are updated in place, donation alone decides here: `step` writes new
    # parameters, and `update` returns differences, as Optax has it.
    del inplace
    if group_size != 32:
        raise ValueError(f"group_size must be 32, for which kernels are written; got {group_size}.")
    if param_groups is not None:
        raise ValueError(
            "param_groups is not supported: use optax.multi_transform, in which these optimizers "
            f"can be parts; got {param_groups!r}."
        )
    return options_of(
        master_bits=master_bits,
        min_size=None if quantize else _EVERYTHING,
        implementation=None if fused else "xla",
    )


def _wrapped(optimizer: Transformation, kind: type[_State]) -> FlashOptimizer:
    """Make an optimizer whose state has flashoptim-jax's names."""
    # Optax's types do not accept a module as a tree; at run time Optax takes any tree.
    inner: Any = optimizer

    def theirs(state: FlashState) -> _State:
        found = {"count": state.count, "mu": state.first, "nu": state.second, "ecc": state.low}
        return kind(**{name: found[name] for name in kind._fields})

    def ours(params: object, state: _State) -> FlashState:
        # States of Lion and SGD have no second moment; halfstep's state has a tree of `None` there.
        nothing = jax.tree.map(lambda _: None, params)
        return FlashState(state.count, state.ecc, state.mu, getattr(state, "nu", nothing))

    def init(params: object) -> _State:
        return theirs(inner.init(params))

    def step(
        params: _T, state: _State, grads: object, finite: ArrayLike | Verdict | None = None
    ) -> tuple[_T, _State]:
        params, made = inner.step(params, ours(params, state), grads, finite)
        return params, theirs(made)

    def update(
        updates: _T, state: _State, params: object = None, **extra: Any
    ) -> tuple[_T, _State]:
        updates, made = inner.update(updates, ours(params, state), params, **extra)
        return updates, theirs(made)

    pair: Any = (init, update)
    made = FlashOptimizer(*pair)
    made.step = step
    return made


def flash_adamw_state_dict(state: FlashAdamState) -> dict[str, Any]:
    """Return a state as a dictionary of trees of arrays."""
    return dict(state._asdict())


def load_flash_adamw_state_dict(state_dict: dict[str, Any]) -> FlashAdamState:
    """Make a state from a dictionary."""
    return FlashAdamState(**state_dict)


def flash_lion_state_dict(state: FlashLionState) -> dict[str, Any]:
    """Return a state as a dictionary of trees of arrays."""
    return dict(state._asdict())


def load_flash_lion_state_dict(state_dict: dict[str, Any]) -> FlashLionState:
    """Make a state from a dictionary."""
    return FlashLionState(**state_dict)


def flash_sgd_state_dict(state: FlashSGDState) -> dict[str, Any]:
    """Return a state as a dictionary of trees of arrays."""
    return dict(state._asdict())


def load_flash_sgd_state_dict(state_dict: dict[str, Any]) -> FlashSGDState:
    """Make a state from a dictionary."""
    return FlashSGDState(**state_dict)


QuantizedArray = Quantized
"""Codes and scales, as `quantize_momentum` and `quantize_variance` return them."""


def quantize_momentum(value: Any, group_size: int = 32) -> QuantizedArray:
    """Write a first moment in 8 bits, with a scale for each group along the last axis."""
    return quantize(value, "int8", groups=Groups(-1, group_size))


def quantize_variance(value: Any, group_size: int = 32) -> QuantizedArray:
    """Write a second moment in 8 bits, as its square root, with a scale for each group."""
    return quantize(value, "root8", groups=Groups(-1, group_size))


def dequantize_momentum(coded: QuantizedArray, group_size: int = 32) -> Any:
    """Read what `quantize_momentum` wrote with the same `group_size`, in float32."""
    return dequantize(coded, "int8", groups=Groups(-1, group_size))


def dequantize_variance(coded: QuantizedArray, group_size: int = 32) -> Any:
    """Read what `quantize_variance` wrote with the same `group_size`, in float32."""
    return dequantize(coded, "root8", groups=Groups(-1, group_size))


def cast_tree_bf16(params: Any) -> Any:
    """Cast float leaves to bfloat16."""
    return jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )


def split_leaf(
    theta: Any, narrow_dtype: Any = jnp.bfloat16, master_weight_bits: int | None = 24
) -> tuple[Any, Any]:
    """Split a float32 leaf into a parameter of a narrower dtype and the bits that it lacks."""
    if jnp.dtype(narrow_dtype) == jnp.float32 or master_weight_bits is None:
        return theta.astype(narrow_dtype), None
    if jnp.dtype(narrow_dtype) != jnp.bfloat16:
        raise ValueError(
            f"a split is into bfloat16 and the rest; got narrow_dtype={jnp.dtype(narrow_dtype)}."
        )
    # 24 bits are the 16 of bfloat16 and 8 of the rest; 32 bits are all.
    return split(theta.astype(jnp.float32), bits=8 if master_weight_bits == 24 else 16)


def reconstruct_leaf(theta_lp: Any, rho: Any) -> Any:
    """Join a parameter and the bits that it lacks into a float32 leaf."""
    return theta_lp.astype(jnp.float32) if rho is None else join(theta_lp, rho)


def reconstruct_weights(params_lp: Any, errors: Any) -> Any:
    """Join low-precision parameters and the `ecc` of a state into float32 parameters."""
    leaves, treedef = jax.tree.flatten(params_lp)
    pairs = zip(leaves, treedef.flatten_up_to(errors), strict=True)
    return treedef.unflatten([reconstruct_leaf(*pair) for pair in pairs])


def set_fp32_params(
    fp32_params: Any, param_template: Any, master_weight_bits: int | None = 24
) -> tuple[Any, Any]:
    """Split float32 parameters into parameters of a template's dtypes and the `ecc` of a state."""
    leaves, treedef = jax.tree.flatten(fp32_params)
    pairs = zip(leaves, treedef.flatten_up_to(param_template), strict=True)
    made = [split_leaf(leaf, like.dtype, master_weight_bits) for leaf, like in pairs]
    return treedef.unflatten([a for a, _ in made]), treedef.unflatten([b for _, b in made])
