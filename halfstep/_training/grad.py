"""Gradient functions in mixed precision, with their options checked."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halfstep._autocast import check_state, settings_of
from halfstep._base import DTypeLike, listed, parse_dtype
from halfstep._policy import Policy, as_policy
from halfstep._training.collective import Reduction
from halfstep._training.f8_scaling import F8Scaling
from halfstep._training.gradient import Gradient
from halfstep._training.scaling import AbstractLossScaling, NoLossScaling


def _named(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _resolve_scaling(scaling: Any, policy: Policy) -> AbstractLossScaling:
    if scaling is None:
        if policy.compute == np.dtype(np.float16):
            raise ValueError(
                f"the policy {str(policy)!r} computes in float16, whose small gradients vanish "
                "without loss scaling: pass scaling=DynamicLossScaling(), or NoLossScaling() if "
                "you mean it."
            )
        return NoLossScaling()
    if not isinstance(scaling, AbstractLossScaling):
        raise TypeError(
            "`scaling` is a DynamicLossScaling, StaticLossScaling or NoLossScaling; got "
            f"{_named(scaling)}. Call the class, or pass the policy by name: policy='bf16'."
        )
    return scaling


def _check_recipe(policy: Policy, state: F8Scaling | None) -> None:
    """Raise unless a policy's recipe and the scaling that carries its state belong together."""
    check_state(policy, has_state=state is not None)
    if state is not None and state.recipe != policy.recipe:
        have = None if policy.recipe is None else policy.recipe.name
        raise ValueError(
            f"the scaling is the state of the recipe {state.recipe.name!r}, and the policy's is "
            f"{have!r}: pass policy={state.recipe.name!r}, or another scaling."
        )


def _contraction_dtype(
    wire: np.dtype | None, compute: np.dtype, axes: Sequence[str]
) -> np.dtype | None:
    """The dtype of weights' gradients, given the one in which they are to be summed."""
    # Over named axes they are cast before they are summed, to whichever dtype.
    return None if axes and wire not in (compute, np.dtype(np.float32)) else wire


def _check_rules(**given: Any) -> None:
    for name, rules in given.items():
        if isinstance(rules, str):
            raise TypeError(f"`{name}` is a sequence of path rules: write {name}=({rules!r},).")


def _check_reductions(**given: str) -> None:
    for name, value in given.items():
        if value not in ("sum", "mean"):
            raise ValueError(f"`{name}` is 'sum' or 'mean'; got {value!r}.")


def _check_microbatches(count: int, carry: str | None, *, has_aux: bool) -> None:
    if count != int(count) or count < 1:
        raise ValueError(f"`microbatches` is a whole number, 1 or more; got {count}.")
    if carry is not None and not (has_aux and count > 1):
        raise ValueError(
            "`carry` goes with has_aux=True and microbatches > 1: pass both, or leave it out."
        )


def filter_value_and_grad(
    func: Callable[..., Any],
    scaling: AbstractLossScaling | None = None,
    *,
    policy: Policy | str = "bf16",
    has_aux: bool = False,
    keep: Sequence[str] = (),
    check_finite: bool | None = None,
    microbatches: int = 1,
    batch: Sequence[str] = (),
    carry: str | None = None,
    microbatch_reduction: Reduction = "mean",
    axis_names: str | Sequence[str] = (),
    axis_reduction: Reduction = "sum",
    reduce_dtype: DTypeLike | None = None,
    islands: bool = True,
    params: int | str | Sequence[int | str] = 0,
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Like `eqx.filter_value_and_grad`, in mixed precision and with loss scaling.

    `func` is rewritten by `autocast`: matrix products and convolutions in the policy's compute
    dtype, what 16 bits would spoil in float32. The loss is taken to float32 and scaled, gradients
    are unscaled in float32 with the scale that was applied, and one verdict says whether everything
    is finite. Differentiation is with respect to the inexact arrays of the first argument.

    With a policy such as `"bf16:inputs"` nothing is rewritten: the floating-point arguments enter
    `func` in the compute dtype (persistent state keeps its own), as in the MPX paper.

    Args:
        func: A function that returns a scalar loss, or `(loss, aux)` with `has_aux`.
        scaling: The loss scaling. `None` means `NoLossScaling()`, which float16 refuses.
        policy: A `Policy` or its text.
        has_aux: Whether `func` returns an auxiliary output. It comes back in the dtypes that
            `func` gives it without mixed precision, so state that goes in and out stays stable.
        keep: Rules for arguments that are not cast, beside the policy's own: paths that begin
            with the function's parameter names, `("state", "batch/targets", "**/running_var")`.
            What they enter is computed in float32, matrix products included.
        check_finite: Whether finiteness is computed. By default if there is a loss scale.
        microbatches: In how many turns the batch is processed. Losses and gradients are summed in
            float32 in the order of the microbatches, with the scale held fixed; then they are
            summed over `axis_names`, unscaled, and multiplied by 1/n. There is one verdict.
            Microbatch `i`
            takes the examples `i, i + n, i + 2n, ...`; a typed scalar PRNG key is split, one for
            each; `aux` is stacked.
        batch: Rules for the leaves that `microbatches` splits along their first axis.
        carry: Name of an argument (such as BatchNorm state) whose new value is in `aux` and that
            each microbatch hands to the next.
        microbatch_reduction: `"mean"` or `"sum"` over the microbatches.
        axis_names: Mesh axes, inside `shard_map`, over which the loss and the gradients are
            reduced and the verdict is agreed. The loss that `func` returns is the shard's own.
        axis_reduction: `"sum"` or `"mean"` over `axis_names`.
        reduce_dtype: The dtype in which gradients cross `axis_names`, float32 by default; and in
            which those of weights come out of matrix products, so the one in which `jit` sums them
            over devices: by default float32 where the compute dtype is float16, else that dtype.
        islands: Whether float32 regions are computed again for the gradient instead of stored.
        params: Which arguments hold parameters, by position or name: the first, which is
            differentiated, and others if there are frozen ones. They do not widen what they meet.

    Returns:
        A function of the same arguments that returns `(value, scaling, finite, grads)`, where
        `value` is the loss, or `(loss, aux)`; `finite` is a `Verdict`.

    Example:
        ```python
        import equinox as eqx
        import halfstep
        import jax
        import jax.numpy as jnp


        def loss(model, x, y):
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)


        model = eqx.nn.Linear(4, 2, key=jax.random.key(0))
        x, y = jnp.ones((8, 4)), jnp.zeros((8, 2))
        scaling = halfstep.DynamicLossScaling()
        value, scaling, finite, grads = halfstep.filter_value_and_grad(
            loss, scaling, policy="f16"
        )(model, x, y)
        assert finite
        assert grads.weight.dtype == jnp.float32
        ```
    """
    policy = as_policy(policy)
    scaling = _resolve_scaling(scaling, policy)
    axes = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    wire = None if reduce_dtype is None else parse_dtype(reduce_dtype)
    _check_rules(keep=keep, batch=batch)
    _check_reductions(microbatch_reduction=microbatch_reduction, axis_reduction=axis_reduction)
    _check_microbatches(microbatches, carry, has_aux=has_aux)
    if wire is not None and policy.mode == "inputs" and not axes:
        raise ValueError(
            "`reduce_dtype` has nothing to act on: there are no `axis_names`, and the policy "
            f"{str(policy)!r} casts arguments only. Leave it out, or the ':inputs' of the policy."
        )
    recipe_state = scaling if isinstance(scaling, F8Scaling) else None
    _check_recipe(policy, recipe_state)
    settings = None
    # Nothing is rewritten in float32, or where the user wants arguments to be cast.
    if policy.mode == "autocast" and policy.compute.itemsize < 4:
        settings = settings_of(
            policy, islands=islands, reduce_dtype=_contraction_dtype(wire, policy.compute, axes)
        )
    gradient = Gradient(
        func=func,
        scaling=scaling,
        recipe_state=recipe_state,
        policy=policy,
        settings=settings,
        has_aux=has_aux,
        keep=(*policy.keep, *keep),
        params=listed(params),
        checks=scaling.checks_finite if check_finite is None else check_finite,
        microbatches=int(microbatches),
        batch=batch,
        carry=carry,
        microbatch_reduction=microbatch_reduction,
        axes=axes,
        axis_reduction=axis_reduction,
        wire=wire,
    )

    @functools.wraps(func)
    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        return gradient.taken(args, kwargs)

    return value_and_grad


def filter_grad(
    func: Callable[..., Any], scaling: AbstractLossScaling | None = None, **options: Any
) -> Callable[..., tuple[Any, ...]]:
    """Like `eqx.filter_grad`, in mixed precision and with loss scaling.

    Args:
        func: A function that returns a scalar loss, or `(loss, aux)` with `has_aux=True`.
        scaling: The loss scaling. `None` means `NoLossScaling()`, which float16 refuses.
        **options: Those of `filter_value_and_grad`: `policy="bf16"`, `has_aux=False`, ...

    Returns:
        A function of the same arguments that returns `(scaling, finite, grads)`, or
        `(scaling, finite, grads, aux)` with `has_aux=True`.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp


        def loss(params, x):
            return jnp.sum((params["w"] * x) ** 2)


        gradient = halfstep.filter_grad(loss, policy="bf16")
        scaling, finite, grads = gradient({"w": jnp.ones(3)}, jnp.arange(3.0))
        assert (grads["w"] == jnp.array([0.0, 2.0, 8.0])).all()
        ```
    """
    with_value = filter_value_and_grad(func, scaling, **options)
    return without_value(with_value, has_aux=options.get("has_aux", False))


def without_value(
    with_value: Callable[..., tuple[Any, Any, Any, Any]], *, has_aux: bool
) -> Callable[..., tuple[Any, ...]]:
    """A gradient function that does not return the value, but for what comes along with it."""

    @functools.wraps(with_value)
    def grad(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        value, adjusted, verdict, grads = with_value(*args, **kwargs)
        return (adjusted, verdict, grads, value[1]) if has_aux else (adjusted, verdict, grads)

    return grad
