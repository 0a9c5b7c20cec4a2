"""Apply or skip the optimizer's step."""

from typing import Any, Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import optax
from jaxtyping import PyTree

from halfstep._base import Shaped, checked, checked_but, path_string, type_of
from halfstep._training.gate import gated
from halfstep._training.verdict import as_predicate

M = TypeVar("M")


@runtime_checkable
class StepsInPlace(Protocol):
    """An optimizer of `halfstep.optim`: one pass over parameters and state, which it may skip."""

    def step(
        self, params: PyTree, state: PyTree, grads: PyTree, /, **options: object
    ) -> tuple[PyTree, PyTree]:
        """Return the new parameters and state; with `finite=False` the old ones."""
        ...


@checked
def apply_gradients(
    model: M,
    optimizer: optax.GradientTransformation,
    optimizer_state: Any,
    grads: Any,
    **extra_args: Any,
) -> tuple[M, Any]:
    """Run the bare Optax step, update and apply, as `optimizer_update` does if all is finite.

    Use it inside `transaction`.

    Args:
        model: Any pytree; its inexact arrays are trained.
        optimizer: Any Optax optimizer.
        optimizer_state: Its state.
        grads: Gradients, of the structure of `eqx.filter(model, eqx.is_inexact_array)`.
        **extra_args: Passed to `optimizer.update`.

    Returns:
        The model and the optimizer's state after the step.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp
        import optax

        model, optimizer = {"w": jnp.ones(2)}, optax.sgd(0.5)
        grads, state = {"w": jnp.ones(2)}, optimizer.init(model)
        model, state = halfstep.apply_gradients(model, optimizer, state, grads)
        assert (model["w"] == 0.5).all()
        ```
    """
    params: Any = eqx.filter(model, eqx.is_inexact_array)
    if isinstance(optimizer, StepsInPlace):
        try:
            params, optimizer_state = optimizer.step(params, optimizer_state, grads, **extra_args)
        except Exception as error:
            # Errors of halfstep's own classes already say what is wrong.
            if type(error) in (AttributeError, TypeError, ValueError):
                _check_trees(params, optimizer, optimizer_state, grads, error)
            raise
        return eqx.combine(params, model), optimizer_state
    try:
        updates, new_state = optimizer.update(grads, optimizer_state, params, **extra_args)
        new_params: Any = optax.apply_updates(params, updates)
    except Exception as error:
        # Optax maps over all trees at once, and its error does not say which one is wrong.
        _check_trees(params, optimizer, optimizer_state, grads, error)
        raise
    return eqx.combine(new_params, model), new_state


def _check_trees(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    state: PyTree,
    grads: PyTree,
    error: Exception,
) -> None:
    """Raise an error that names the tree that does not match the model, if one does not."""
    wanted, given = jax.tree.structure(params), jax.tree.structure(grads)
    if wanted != given:
        raise ValueError(
            f"`grads` must have the structure of the model's inexact arrays, {wanted}; got {given}."
            " Pass what `filter_grad` returns for this model."
        ) from error
    fresh = eqx.filter_eval_shape(optimizer.init, params)
    wanted, given = jax.tree.structure(fresh), jax.tree.structure(state)
    if wanted != given:
        raise ValueError(
            f"`optimizer_state` must be the state of this optimizer for this model, {wanted}; got "
            f"{given}. Make it with optimizer.init(eqx.filter(model, eqx.is_inexact_array))."
        ) from error
    pairs = zip(jax.tree_util.tree_flatten_with_path(fresh)[0], jax.tree.leaves(state), strict=True)
    for (path, like), leaf in pairs:
        both = isinstance(like, Shaped) and isinstance(leaf, Shaped)
        if both and tuple(like.shape) != tuple(leaf.shape):
            raise ValueError(
                "`optimizer_state` must be the state of this optimizer for this model: "
                f"{path_string(path)} must be {type_of(like)}; got {type_of(leaf)}. Make it with "
                "optimizer.init(eqx.filter(model, eqx.is_inexact_array))."
            ) from error


@checked_but("optimizer")
def optimizer_update(
    model: M,
    optimizer: optax.GradientTransformation,
    optimizer_state: Any,
    grads: Any,
    grads_finite: Any,
    **extra_args: Any,
) -> tuple[M, Any]:
    """Apply an optimizer's step if the gradients are finite, else leave everything as it was.

    With finite gradients the result equals the bare Optax step's, bit for bit.

    Args:
        model: Any pytree; its inexact arrays are trained.
        optimizer: Any Optax optimizer, initialized with `eqx.filter(model, eqx.is_inexact_array)`.
        optimizer_state: Its state.
        grads: Gradients as `filter_grad` returns them.
        grads_finite: The verdict `filter_grad` returns, or a boolean scalar. A verdict that was
            not checked compiles no gate: it is the bare step.
        **extra_args: Passed to `optimizer.update`, such as `value`, `grad` and `value_fn` for
            `optax.lbfgs`.

    Returns:
        The model and the optimizer's state.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp
        import optax

        model, optimizer = {"w": jnp.ones(3)}, optax.adamw(1e-3)
        state = optimizer.init(model)
        model, state = halfstep.optimizer_update(
            model, optimizer, state, {"w": jnp.ones(3)}, jnp.asarray(True)
        )
        assert (model["w"] < 1).all()
        ```
    """
    if not callable(getattr(optimizer, "init", None)):
        raise TypeError(
            "`optimizer` must be an Optax optimizer, such as optax.adamw(1e-3); got "
            f"{type(optimizer).__name__}. Write optimizer_update(model, optimizer, "
            "optimizer_state, grads, finite)."
        )
    predicate = as_predicate(grads_finite, "grads_finite")
    if isinstance(optimizer, StepsInPlace):
        # The optimizer skips by itself, in place: a gate would have to hold both states at once.
        finite = {} if predicate is None else {"finite": grads_finite}
        return apply_gradients(model, optimizer, optimizer_state, grads, **finite, **extra_args)

    def commit(state: tuple[M, Any]) -> tuple[M, Any]:
        return apply_gradients(state[0], optimizer, state[1], grads, **extra_args)

    return gated(grads_finite, commit, (model, optimizer_state))
