"""Transformations of gradients in front of an optimizer that steps by itself."""

from typing import Any, NamedTuple

import equinox as eqx
import optax

from halfstep._training import as_predicate, select_tree
from halfstep.optim._transform import Transformation, is_trained, transformation


class ChainState(NamedTuple):
    """The state of a chain.

    Attributes:
        first: That of the transformations in front, as `optax.chain` has it.
        last: That of the optimizer.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        optimizer = optim.chain(optax.clip_by_global_norm(1.0), optim.flash_sgd(0.1))
        state = optimizer.init(jnp.ones(4))
        assert isinstance(state, optim.ChainState)
        assert isinstance(state.last, optim.FlashState)
        ```
    """

    first: Any
    last: Any


def chain(*transforms: optax.GradientTransformation) -> Transformation:
    """`optax.chain` with an optimizer of this package at its end, and with its `step`.

    What comes before it, such as `optax.clip_by_global_norm`, changes gradients. Updates, 4 bytes a
    parameter, are never made. Where `finite` is false no state changes.

    Args:
        *transforms: Any number of Optax's, and at last an optimizer of this package.

    Returns:
        An optimizer of Optax's kind, which also has `step` and `prepare`.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        optimizer = optim.chain(optax.clip_by_global_norm(1.0), optim.flash_adamw(1e-3))
        params, state = optimizer.prepare({"w": jnp.full((128, 64), 0.1)})
        params, state = optimizer.step(params, state, {"w": jnp.ones((128, 64))})
        assert params["w"].dtype == jnp.bfloat16
        ```
    """
    *front, last = transforms or (None,)
    if not isinstance(last, Transformation):
        raise TypeError(
            "the last of a chain must be an optimizer of halfstep.optim, such as flash_adamw; got "
            f"{type(last).__name__}. For Optax's own, use optax.chain."
        )
    if any(isinstance(one, Transformation) for one in front):
        raise TypeError(
            "only the last of a chain may be an optimizer of halfstep.optim: what changes its "
            "updates would part them from its state. Put it at the end."
        )
    before = optax.with_extra_args_support(optax.chain(*front))

    def init(params: Any) -> ChainState:
        return ChainState(before.init(eqx.filter(params, is_trained)), last.init(params))

    def prepare(params: Any) -> tuple[Any, ChainState]:
        made, state = last.prepare(params)
        return made, ChainState(before.init(eqx.filter(made, is_trained)), state)

    def step(
        params: Any, state: ChainState, grads: Any, finite: Any = None, **extra_args: Any
    ) -> tuple[Any, ChainState]:
        trained = eqx.filter(params, is_trained)
        grads, first = before.update(grads, state.first, trained, **extra_args)
        decided = finite is not None and as_predicate(finite) is not None
        if decided:
            first = select_tree(finite, first, state.first)
        options = {**extra_args, "finite": finite} if decided else extra_args
        new, rest = last.step(params, state.last, grads, **options)
        return new, ChainState(first, rest)

    return transformation(init, step, prepare)
