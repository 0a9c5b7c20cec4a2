"""One training step in several ways, and the arguments that it is compiled for.

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
from benchmarks._models import Model

OPTIMIZER = optax.adamw(1e-3)
DONATED = (0, 1, 2)
"""Parameters, optimizer state and loss scaling: what a step returns anew."""

Loss = Callable[..., Any]
Step = Callable[..., tuple[Any, Any, Any, Any]]
"""Of parameters, optimizer state, loss scaling and a batch."""


def float32(loss: Loss) -> Step:
    """The plain step."""

    def step(model: Any, opt_state: Any, scaling: Any, *batch: Any):
        value, grads = eqx.filter_value_and_grad(loss)(model, *batch)
        return *_update(model, opt_state, grads), scaling, value

    return step


def by_hand(loss: Loss) -> Step:
    """Model and images are cast to bfloat16 inside the loss; what is trained stays float32."""
    return float32(cast_inside(loss))


def cast_inside(loss: Loss) -> Loss:
    """A loss that begins by casting its arguments to bfloat16."""

    def cast_loss(*args: Any) -> Any:
        return loss(
            *jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, args)
        )

    return cast_loss


def with_mpx(loss: Loss) -> Step:
    """As mpx's README has it: float16, with dynamic loss scaling."""

    def step(model: Any, opt_state: Any, scaling: Any, *batch: Any):
        import mpx

        value, scaling, finite, grads = mpx.filter_value_and_grad(loss, scaling)(model, *batch)
        model, opt_state = mpx.optimizer_update(model, OPTIMIZER, opt_state, grads, finite)
        return model, opt_state, scaling, value

    return step


def with_halfstep(policy: str | halfstep.Policy) -> Callable[[Loss], Step]:
    """As halfstep's README has it."""

    def of(loss: Loss) -> Step:
        def step(model: Any, opt_state: Any, scaling: Any, *batch: Any):
            grad_fn = halfstep.filter_value_and_grad(loss, scaling, policy=policy)
            value, scaling, finite, grads = grad_fn(model, *batch)
            model, opt_state = halfstep.optimizer_update(model, OPTIMIZER, opt_state, grads, finite)
            return model, opt_state, scaling, value

        return step

    return of


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
    """How a step is made of a loss, and the loss scaling that it begins with."""

    of: Callable[[Loss], Step]
    scaling: Callable[[], Any]


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "f32": Variant(float32, tuple),
        "by hand, bf16": Variant(by_hand, tuple),
        "mpx, f16": Variant(with_mpx, _mpx_scaling),
        "halfstep inputs, bf16": Variant(with_halfstep("bf16:inputs"), halfstep.NoLossScaling),
        "halfstep, bf16": Variant(with_halfstep("bf16"), halfstep.NoLossScaling),
        "halfstep, f16": Variant(with_halfstep("f16"), halfstep.DynamicLossScaling),
    }
)
"""The steps that are compared."""


def arguments(variant: Variant, model: Model, batch: int) -> tuple[Any, ...]:
    """The shapes of a step's arguments: nothing of the model's size is allocated."""
    shape = model.shape()
    params = eqx.filter(shape, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    opt_state = eqx.filter_eval_shape(OPTIMIZER.init, params)
    return shape, opt_state, variant.scaling(), *model.batch(batch)
