"""Provide the names of jmp 0.0.4: `import halfstep.compat.jmp as jmp` is the whole migration.

Loss scales are halfstep's with jmp's constructors, so `halfstep.filter_grad` takes them as well.
Mistakes of jmp are corrected here; the migration guide lists each difference.
"""

import contextlib
import dataclasses
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Bool

from halfstep import _policy, _training
from halfstep._base import DTypeLike, dtype_name, half_precision, parse_dtype
from halfstep._policy import cast_tree
from halfstep.compat._scale import CEILING, power_of_two_below

__all__ = (
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
)


def __dir__() -> list[str]:
    return sorted(__all__)


T = TypeVar("T")

# jmp writes float32 as "full"; its other names are halfstep's.
_NAMES = MappingProxyType({"f32": "full"})


def half_dtype() -> Any:
    """Return `jnp.bfloat16` if the first device is a TPU, else `jnp.float16`.

    This starts the backend.
    """
    return jnp.bfloat16 if jax.local_devices()[0].platform == "tpu" else jnp.float16


def _scalar_type(dtype: DTypeLike) -> Any:
    """Return a type that can be called, such as `jnp.float16`, for a dtype in any notation."""
    # NumPy takes "half" for float16, so only strings are compared with it.
    by_backend = isinstance(dtype, str) and dtype == "half"
    return getattr(jnp, parse_dtype(half_dtype() if by_backend else dtype).name)


@jtu.register_static
@dataclasses.dataclass(frozen=True, init=False)
class Policy:
    """The dtypes of parameters, computation and results. Immutable; a static pytree.

    Attributes:
        param_dtype: Dtype of the parameters.
        compute_dtype: Dtype of the computation.
        output_dtype: Dtype of the results.
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any

    def __init__(self, param_dtype: DTypeLike, compute_dtype: DTypeLike, output_dtype: DTypeLike):
        for name, dtype in (
            ("param_dtype", param_dtype),
            ("compute_dtype", compute_dtype),
            ("output_dtype", output_dtype),
        ):
            object.__setattr__(self, name, _scalar_type(dtype))

    def cast_to_param(self, x: T) -> T:
        """Cast the floating-point arrays of a pytree to the parameters' dtype."""
        return cast_tree(x, self.param_dtype, float64=True)

    def cast_to_compute(self, x: T) -> T:
        """Cast the floating-point arrays of a pytree to the compute dtype."""
        return cast_tree(x, self.compute_dtype, float64=True)

    def cast_to_output(self, x: T) -> T:
        """Cast the floating-point arrays of a pytree to the output dtype."""
        return cast_tree(x, self.output_dtype, float64=True)

    def with_output_dtype(self, output_dtype: DTypeLike) -> "Policy":
        """Return the same policy with another output dtype."""
        return Policy(self.param_dtype, self.compute_dtype, output_dtype)

    def __str__(self) -> str:
        dtypes = (self.param_dtype, self.compute_dtype, self.output_dtype)
        names = [dtype_name(dtype) for dtype in dtypes]
        return ",".join(
            f"{key}={_NAMES.get(name, name)}" for key, name in zip("pco", names, strict=True)
        )


def get_policy(policy_name: str) -> Policy:
    """Parse a policy from a string.

    Args:
        policy_name: A dtype's name, which then holds for parameters, computation and results
            alike (unlike in halfstep, where `"bf16"` keeps parameters and results in float32), or
            parts such as `"params=float32,compute=float16,output=float32"` or `"p=f32,c=bf16"`.
            Parameters default to float32, compute follows params and output follows compute.
            `"half"` depends on the backend, see `half_dtype`.
    """
    text = policy_name if "=" in policy_name else f"params={policy_name}"
    # `half_dtype` is called only if needed, because it starts the backend.
    half = half_precision(half_dtype()) if "half" in text else contextlib.nullcontext()
    with half:
        parsed = _policy.Policy.parse(text)
    if parsed.keep:
        raise ValueError(
            f"a policy of jmp has params, compute and output; got {policy_name!r}. "
            "For `keep`, use halfstep.Policy."
        )
    return Policy(parsed.param, parsed.compute, parsed.output)


def cast_to_full(tree: T) -> T:
    """Cast the floating-point arrays of a pytree to float32."""
    return cast_tree(tree, jnp.float32, float64=True)


def cast_to_half(tree: T) -> T:
    """Cast the floating-point arrays of a pytree to `half_dtype()`."""
    return cast_tree(tree, half_dtype(), float64=True)


class DynamicLossScale(_training.DynamicLossScaling):
    """halfstep's `DynamicLossScaling` with jmp's constructor and limits.

    Args:
        loss_scale: The initial scale, of any dtype, rounded down to a power of two.
        counter: Good steps so far.
        period: Good steps in a row before the scale grows.
        factor: The factor by which the scale grows and shrinks, a power of two.
        min_loss_scale: The floor, rounded down to a power of two.
    """

    def __init__(
        self,
        loss_scale: Any,
        counter: Any = 0,
        period: int = 2000,
        factor: int = 2,
        min_loss_scale: Any = 1.0,
    ):
        super().__init__(
            power_of_two_below(loss_scale, "loss_scale"),
            power_of_two_below(min_loss_scale, "min_loss_scale"),
            CEILING,
            period=period,
            factor=factor,
        )
        self.counter = jnp.asarray(counter, jnp.int32)

    @property
    def loss_scale(self) -> Array:
        """The scale, in float32."""
        return self.loss_scaling

    @property
    def min_loss_scale(self) -> float:
        """The floor."""
        return self.min_loss_scaling


class StaticLossScale(_training.StaticLossScaling):
    """halfstep's `StaticLossScaling` with jmp's constructor.

    Args:
        loss_scale: The scale, of any dtype, rounded down to a power of two.
    """

    def __init__(self, loss_scale: Any):
        super().__init__(power_of_two_below(loss_scale, "loss_scale"))

    @property
    def loss_scale(self) -> Array:
        """The scale, in float32."""
        return self.loss_scaling


class NoOpLossScale(_training.NoLossScaling):
    """halfstep's `NoLossScaling`: trees pass through."""

    def __init__(self):
        super().__init__()

    @property
    def loss_scale(self) -> int:
        """One."""
        return 1


LossScale: TypeAlias = NoOpLossScale | StaticLossScale | DynamicLossScale
"""Any of the three loss scales."""


def all_finite(tree: Any) -> Bool[Array, ""]:
    """Return whether every floating-point or complex number in a pytree is finite."""
    return _training.all_finite(tree)


def select_tree(pred: Any, a: T, b: T) -> T:
    """Return `a` if `pred`, else `b`.

    Arrays and PRNG keys are selected. Python numbers that differ become arrays, as in jmp; every
    other leaf must be the same in both trees.
    """
    if jtu.tree_structure(a) != jtu.tree_structure(b):
        return _training.select_tree(pred, a, b)  # Its error shows both structures.

    # Only numbers that differ become arrays. A number that is the same in both trees stays a Python
    # number, which is static.
    def selectable(leaf: object, other: object) -> Any:
        numbers = all(isinstance(x, bool | int | float | complex) for x in (leaf, other))
        return np.asarray(leaf) if numbers and leaf != other else leaf

    return _training.select_tree(
        pred, jtu.tree_map(selectable, a, b), jtu.tree_map(selectable, b, a)
    )
