"""One training step in five ways, and the arguments that it is compiled for.

Model, loss and optimizer are the same in all. What differs is who casts, and to what.
"""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import halfstep
from benchmarks._vit import ViT, loss

OPTIMIZER = optax.adamw(1e-3)
DONATED = (0, 1, 2)
"""Parameters, optimizer state and loss scaling: what a step returns anew."""

Step = Callable[[Any, Any, Any, Any, Any], tuple[Any, Any, Any, Any]]


def float32(model: Any, opt_state: Any, scaling: Any, images: Any, labels: Any):
    """The plain step."""
    value, grads = eqx.filter_value_and_grad(loss)(model, images, labels)
    return *_update(model, opt_state, grads), scaling, value


def by_hand(model: Any, opt_state: Any, scaling: Any, images: Any, labels: Any):
    """Model and images are cast to bfloat16 inside the loss; what is trained stays float32."""

    def cast_loss(model: Any, images: Any, labels: Any) -> Any:
        model, images = jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, (model, images)
        )
        return loss(model, images, labels)

    value, grads = eqx.filter_value_and_grad(cast_loss)(model, images, labels)
    return *_update(model, opt_state, grads), scaling, value


def with_mpx(model: Any, opt_state: Any, scaling: Any, images: Any, labels: Any):
    """As mpx's README has it: float16, with dynamic loss scaling."""
    import mpx

    value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling)(model, images, labels)
    model, opt_state = mpx.optimizer_update(model, OPTIMIZER, opt_state, grads, finite)
    return model, opt_state, scaling, value


def with_halfstep(policy: str) -> Step:
    """As halfstep's README has it."""

    def step(model: Any, opt_state: Any, scaling: Any, images: Any, labels: Any):
        grad_fn = halfstep.filter_value_and_grad(loss, scaling, policy=policy)
        value, scaling, finite, grads = grad_fn(model, images, labels)
        model, opt_state = halfstep.optimizer_update(model, OPTIMIZER, opt_state, grads, finite)
        return model, opt_state, scaling, value

    return step


def _update(model: Any, opt_state: Any, grads: Any) -> tuple[Any, Any]:
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state


def _mpx_scaling() -> Any:
    try:
        import mpx
    except ImportError:
        raise SystemExit(
            "this compares with mpx, which is not installed: pip install mixed-precision-for-JAX"
        ) from None
    return mpx.DynamicLossScaling(
        loss_scaling=jnp.float32(jnp.finfo(jnp.float16).max),
        min_loss_scaling=jnp.ones((), jnp.float32),
    )


@dataclasses.dataclass(frozen=True)
class Variant:
    """A step, and the loss scaling that it begins with."""

    step: Step
    scaling: Callable[[], Any]


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "f32": Variant(float32, tuple),
        "by hand, bf16": Variant(by_hand, tuple),
        "mpx, f16": Variant(with_mpx, _mpx_scaling),
        "halfstep, bf16": Variant(with_halfstep("bf16"), halfstep.NoLossScaling),
        "halfstep, f16": Variant(with_halfstep("f16"), halfstep.DynamicLossScaling),
    }
)
"""The steps that are compared."""


def arguments(variant: Variant, sizes: Mapping[str, int], batch: int) -> tuple[Any, ...]:
    """The shapes of a step's arguments: nothing of the model's size is allocated."""
    model = eqx.filter_eval_shape(ViT, **sizes, key=jax.random.key(0))
    params = eqx.filter(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    opt_state = eqx.filter_eval_shape(OPTIMIZER.init, params)
    image = sizes["image"]
    images = jax.ShapeDtypeStruct((batch, image, image, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return model, opt_state, variant.scaling(), images, labels
