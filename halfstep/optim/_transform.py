"""Make Optax optimizers that can also step by themselves, alone or at the end of a chain."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from halfstep._base import checked, is_inexact
from halfstep._training import as_predicate, select_tree


class Transformation(optax.GradientTransformationExtraArgs):
    """An optimizer of this package: `init` and `update`, as in Optax, and two more functions.

    Attributes:
        step: `step(params, state, grads, finite=None)` returns new parameters and a new state. It
            does in one pass what `update` and `optax.apply_updates` do in two. With donated
            arguments it works in place. If `finite` is false, nothing changes.
        prepare: `prepare(params)` returns parameters to compute with and a state. It converts
            large float32 parameters to bfloat16 and stores the bits that they lack in the state.
            `init` takes parameters as they are.

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
    """Make an optimizer from a function that steps in one pass.

    Args:
        init: Makes the state for given parameters.
        step: Makes new parameters and a new state from parameters, a state and gradients.
        prepare: Makes parameters to compute with, and their state, from float32 parameters.
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[PyTree, PyTree]:
        if params is None:
            raise ValueError(
                "a compressed optimizer needs the parameters, since its state holds a part of "
                "them; got params=None. Call update(grads, state, params)."
            )
        new, state = step(params, state, updates, **extra_args)
        return _difference(new, params), state

    # Optax's optimizers are named tuples of two fields, and its functions unpack them as such.
    # `step` and `prepare` are therefore attributes and not fields.
    pair: Any = (init, update)
    made = Transformation(*pair)
    made.step, made.prepare = step, prepare
    return made


def of_models(made: Transformation) -> Transformation:
    """Return the same optimizer for whole models; functions, strings and integers are kept.

    Optax maps arithmetic over every leaf that it gets, so it gets only the floating-point leaves.
    """

    def init_model(params: PyTree) -> PyTree:
        return made.init(eqx.filter(params, is_trained))

    def prepare_model(params: PyTree) -> tuple[PyTree, PyTree]:
        trained, rest = eqx.partition(params, is_trained)
        low, state = made.prepare(trained)
        return eqx.combine(low, rest), state

    def step_model(
        params: PyTree, state: PyTree, grads: PyTree, *args: Any, **options: Any
    ) -> tuple[PyTree, PyTree]:
        trained, rest = eqx.partition(params, is_trained)
        given = jax.tree.map(lambda p, g: g if is_trained(p) else None, params, grads)
        new, state = made.step(trained, state, given, *args, **options)
        return eqx.combine(new, rest), state

    return transformation(init_model, step_model, prepare_model)


def is_trained(leaf: object) -> bool:
    """Return whether a leaf is a floating-point array, or the shape of one."""
    dtype = getattr(leaf, "dtype", None)
    return is_inexact(leaf) or (dtype is not None and jnp.issubdtype(dtype, jnp.inexact))


def _difference(new: PyTree, old: PyTree) -> PyTree:
    """Return the updates that `optax.apply_updates` has to add to the old parameters.

    For bfloat16 parameters they are in float32: the difference of two bfloat16 values may need more
    bits than bfloat16 has, and `optax.apply_updates` adds in the wider dtype before it rounds.
    """

    def of(new: PyTree, old: PyTree) -> PyTree:
        if not is_inexact(old):
            return jnp.zeros_like(old) if hasattr(old, "dtype") else old
        wide = np.promote_types(old.dtype, jnp.float32)
        return new.astype(wide) - old.astype(wide)

    return jax.tree.map(of, new, old)


class ChainState(NamedTuple):
    """The state of a chain.

    Attributes:
        first: The state of the transformations before the optimizer, as in `optax.chain`.
        last: The state of the optimizer.

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


@checked
def chain(*transforms: optax.GradientTransformation) -> Transformation:
    """Chain Optax transformations with an optimizer of this package at the end.

    Unlike the result of `optax.chain`, the chain has the optimizer's `step`. The transformations
    before the optimizer, such as `optax.clip_by_global_norm`, change the gradients. `step` never
    makes the updates, which would take 4 bytes per parameter. If `finite` is false, no state
    changes.

    Args:
        *transforms: Any number of Optax transformations, then an optimizer of this package.

    Returns:
        An Optax optimizer that also has `step` and `prepare`.

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
    early = [place for place, one in enumerate(front, 1) if isinstance(one, Transformation)]
    if early:
        raise TypeError(
            "only the last of a chain may be an optimizer of halfstep.optim: its state holds bits "
            "of the parameters, which a later change of its updates would contradict; got one as "
            f"argument {early[0]} of {len(transforms)}. Put it at the end."
        )
    before = optax.with_extra_args_support(optax.chain(*front))

    def init(params: PyTree) -> ChainState:
        return ChainState(before.init(eqx.filter(params, is_trained)), last.init(params))

    def prepare(params: PyTree) -> tuple[PyTree, ChainState]:
        made, state = last.prepare(params)
        return made, ChainState(before.init(eqx.filter(made, is_trained)), state)

    def step(
        params: PyTree, state: ChainState, grads: PyTree, finite: object = None, **extra_args: Any
    ) -> tuple[PyTree, ChainState]:
        trained = eqx.filter(params, is_trained)
        grads, first = before.update(grads, state.first, trained, **extra_args)
        # The last optimizer skips by itself. The state of the transformations before it is selected
        # here: otherwise a norm or an average of gradients that are not finite would stay in it.
        decided = finite is not None and as_predicate(finite) is not None
        if decided:
            first = select_tree(finite, first, state.first)
        options = {**extra_args, "finite": finite} if decided else extra_args
        new, rest = last.step(params, state.last, grads, **options)
        return new, ChainState(first, rest)

    return transformation(init, step, prepare)
