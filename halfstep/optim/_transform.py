"""An Optax optimizer that can also step by itself."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from halfstep._base import is_inexact


class Transformation(optax.GradientTransformationExtraArgs):
    """What the optimizers of this package are: `init` and `update`, as Optax has them, and more.

    Attributes:
        step: `step(params, state, grads, finite=None)` returns new parameters and a new state. It
            does in one pass what `update` and `optax.apply_updates` do in two, and with donated
            arguments in place. Where `finite` is false nothing changes.
        prepare: `prepare(params)` returns parameters to compute with and a state: it converts
            large float32 parameters to bfloat16 and stores what they lack. `init` takes parameters
            as they are.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        optimizer = optim.flash_sgd(0.5)
        params, grads = jnp.ones(4), jnp.full(4, 0.5)
        state = optimizer.init(params)
        updates, _ = optimizer.update(grads, state, params)
        new, state = optimizer.step(params, state, grads)
        assert (new == optax.apply_updates(params, updates)).all()
        kept, state = optimizer.step(new, state, grads, finite=False)
        assert (kept == new).all()
        ```
    """

    step: Callable[..., tuple[Any, Any]]
    prepare: Callable[[Any], tuple[Any, Any]]


def transformation(
    init: Callable[[Any], Any],
    step: Callable[..., tuple[Any, Any]],
    prepare: Callable[[Any], tuple[Any, Any]],
) -> Transformation:
    """An optimizer from what it does in one pass.

    Args:
        init: Makes the state of parameters.
        step: Of parameters, state and gradients makes new parameters and a new state.
        prepare: Of float32 parameters makes those to compute with, and their state.
    """

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(
                "a compressed optimizer needs the parameters, since its state holds a part of "
                "them; got params=None. Call update(grads, state, params)."
            )
        new, state = step(params, state, updates, **extra_args)
        return difference(new, params), state

    pair: Any = (init, update)
    made = Transformation(*pair)
    made.step, made.prepare = step, prepare
    return made


def of_models(made: Transformation) -> Transformation:
    """The same for whole models: functions, texts and integers in them stay as they are."""

    def init_model(params: Any) -> Any:
        return made.init(eqx.filter(params, is_trained))

    def prepare_model(params: Any) -> tuple[Any, Any]:
        trained, rest = eqx.partition(params, is_trained)
        low, state = made.prepare(trained)
        return eqx.combine(low, rest), state

    def step_model(params: Any, state: Any, grads: Any, *args: Any, **options: Any) -> Any:
        trained, rest = eqx.partition(params, is_trained)
        given = jax.tree.map(lambda p, g: g if is_trained(p) else None, params, grads)
        new, state = made.step(trained, state, given, *args, **options)
        return eqx.combine(new, rest), state

    return transformation(init_model, step_model, prepare_model)


def is_trained(leaf: Any) -> bool:
    """Whether a leaf is made of floating-point numbers, or has the shape of such an array."""
    dtype = getattr(leaf, "dtype", None)
    return is_inexact(leaf) or (dtype is not None and jnp.issubdtype(dtype, jnp.inexact))


def difference(new: Any, old: Any) -> Any:
    """What `optax.apply_updates` is to add; of bfloat16 in float32, which is exact."""

    def of(new: Any, old: Any) -> Any:
        if not is_inexact(old):
            return jnp.zeros_like(old) if hasattr(old, "dtype") else old
        wide = np.promote_types(old.dtype, jnp.float32)
        return new.astype(wide) - old.astype(wide)

    return jax.tree.map(of, new, old)
