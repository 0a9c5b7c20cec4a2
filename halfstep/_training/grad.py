"""Gradient functions in mixed precision: rewrite, scale, differentiate, reduce, unscale, judge."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from halfstep._autocast import Settings, check_state, rewritten, settings_of
from halfstep._base import (
    Arguments,
    DTypeLike,
    at_least_float32,
    check_options,
    checked_but,
    dtype_name,
    is_state_node,
    listed,
    option_names,
    parse_dtype,
    path_string,
    refusing,
)
from halfstep._policy import (
    Policy,
    as_policy,
    cast_arguments,
    cast_tree,
    is_castable,
    recipes_of,
)
from halfstep._training.collective import (
    Reduction,
    agree,
    reduce_gradients,
    reduce_value,
    vary_tree,
)
from halfstep._training.f8_scaling import F8Scaling
from halfstep._training.microbatch import accumulate
from halfstep._training.scaling import AbstractLossScaling, NoLossScaling
from halfstep._training.verdict import Verdict, finite_flags, judge, magnitudes, unchecked


def _named(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _resolve_scaling(scaling: object, policy: Policy) -> AbstractLossScaling:
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
    random = [one for one in recipes_of(policy.recipe, policy.rules) if one.is_random]
    if state is not None and random and state.key is None:
        raise ValueError(
            f"the scaling has no random key, which the recipe {random[0].name!r} of the policy's "
            f"rules needs: make it with halfstep.RECIPES[{state.recipe.name!r}].init(loss, *args, "
            "key=jax.random.key(0), policy=policy)."
        )


def _contraction_dtype(
    wire: np.dtype | None, compute: np.dtype, axes: Sequence[str]
) -> np.dtype | None:
    """Return the dtype of weights' gradients, given the dtype in which they are to be summed."""
    # Over named axes `reduce_gradients` casts to any dtype before it sums, so products need not
    # write a dtype that is neither the compute dtype nor float32.
    return None if axes and wire not in (compute, np.dtype(np.float32)) else wire


def _check_rules(**given: Sequence[str]) -> None:
    for name, rules in given.items():
        if isinstance(rules, str):
            raise TypeError(f"`{name}` is a sequence of path rules: write {name}=({rules!r},).")


def _check_reductions(**given: str) -> None:
    for name, value in given.items():
        if value not in ("sum", "mean"):
            raise ValueError(f"`{name}` is 'sum' or 'mean'; got {value!r}.")


def _check_microbatches(count: int, carry: str | None, *, has_aux: bool) -> None:
    if count != int(count) or count < 1:
        raise ValueError(f"`microbatches` is an integer, 1 or more; got {count}.")
    if carry is not None and not (has_aux and count > 1):
        raise ValueError(
            "`carry` goes with has_aux=True and microbatches > 1; got "
            f"carry={carry!r}, has_aux={has_aux}, microbatches={count}. Pass both, or leave it out."
        )


@checked_but("scaling")
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
    params: int | str | Sequence[int | str] = 0,
) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Transform a loss like `eqx.filter_value_and_grad`, in mixed precision with loss scaling.

    `autocast` rewrites `func`: matrix products and convolutions run in the policy's compute dtype,
    and operations that need more precision stay in float32. The loss is converted to float32 and
    scaled. Gradients are unscaled in float32 with the scale that was applied, and one verdict says
    whether everything is finite. Differentiation is with respect to the inexact arrays of the first
    argument.

    With a policy such as `"bf16:inputs"` nothing is rewritten: the floating-point arguments enter
    `func` in the compute dtype (persistent state keeps its own), as in the MPX paper.

    Args:
        func: A function that returns a scalar loss, or `(loss, aux)` with `has_aux`.
        scaling: The loss scaling. `None` means `NoLossScaling()`, which float16 refuses.
        policy: A `Policy` or its text.
        has_aux: Whether `func` returns an auxiliary output. The output has the dtypes that `func`
            gives it without mixed precision, so state that goes in and out keeps its dtypes.
        keep: Rules for arguments that are not cast, in addition to the policy's own: paths that
            begin with the function's parameter names,
            `("state", "batch/targets", "**/running_var")`. Operations on these arguments run in
            float32, matrix products included.
        check_finite: Whether finiteness is computed. By default only if there is a loss scale.
        microbatches: The number of parts in which the batch is processed, one after the other.
            Losses and gradients are summed in float32 in the order of the microbatches, with the
            scale held fixed; then they are summed over `axis_names`, unscaled, and multiplied by
            1/n. There is one verdict. Microbatch `i` takes the examples `i, i + n, i + 2n, ...`; a
            typed scalar PRNG key is split into one key for each; `aux` is stacked.
        batch: Rules for the leaves that `microbatches` splits along their first axis.
        carry: Name of an argument (such as BatchNorm state) whose new value is in `aux` and that
            each microbatch hands to the next.
        microbatch_reduction: `"mean"` or `"sum"` over the microbatches.
        axis_names: Mesh axes, inside `shard_map`, over which the loss and the gradients are
            reduced and the verdict is agreed on. The loss that `func` returns is the shard's own.
        axis_reduction: `"sum"` or `"mean"` over `axis_names`.
        reduce_dtype: The dtype in which gradients are reduced over `axis_names`, float32 by
            default. It is also the dtype in which matrix products return the gradients of weights,
            and so the dtype in which `jit` sums them over devices: by default float32 if the
            compute dtype is float16, otherwise the compute dtype.
        params: Which arguments hold parameters, by position or name: the first, which is
            differentiated, and others if there are frozen ones. Parameters do not widen the values
            that they are combined with.

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
    # Nothing is rewritten if all is float32, or if the policy casts arguments instead.
    if policy.mode == "autocast" and policy.compute.itemsize < 4:
        settings = settings_of(policy, reduce_dtype=_contraction_dtype(wire, policy.compute, axes))
    gradient = _Gradient(
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

    def value_and_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
        return gradient.taken(args, kwargs)

    options = option_names(filter_value_and_grad)
    return refusing(filter_value_and_grad, options, func, value_and_grad)


@checked_but("scaling")
def filter_grad(
    func: Callable[..., Any], scaling: AbstractLossScaling | None = None, **options: Any
) -> Callable[..., tuple[Any, ...]]:
    """Transform a loss like `eqx.filter_grad`, in mixed precision with loss scaling.

    Args:
        func: A function that returns a scalar loss, or `(loss, aux)` with `has_aux=True`.
        scaling: The loss scaling. `None` means `NoLossScaling()`, which float16 refuses.
        **options: The options of `filter_value_and_grad`: `policy="bf16"`, `has_aux=False`, ...

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
    known = option_names(filter_value_and_grad)
    check_options(filter_grad, options, known)
    with_value = filter_value_and_grad(func, scaling, **options)
    made = without_value(with_value, has_aux=options.get("has_aux", False))
    return refusing(filter_grad, known, func, made)


def without_value(
    with_value: Callable[..., tuple[Any, Any, Any, Any]], *, has_aux: bool
) -> Callable[..., tuple[Any, ...]]:
    """Make a gradient function return no value, only the auxiliary output."""

    @functools.wraps(with_value)
    def grad(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        value, adjusted, verdict, grads = with_value(*args, **kwargs)
        return (adjusted, verdict, grads, value[1]) if has_aux else (adjusted, verdict, grads)

    return grad


class _Step(NamedTuple):
    """The results of one pass over a batch or all microbatches; gradients are still scaled."""

    loss: Any
    aux: Any
    grads: Any
    seen: Any
    """Magnitudes of the values that a recipe with state has quantized."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Gradient:
    """A gradient with its checked options. `taken` runs all of it, other methods are its steps.

    Attributes:
        func: The loss function.
        scaling: The loss scaling.
        recipe_state: The same object, if it also carries the state of a recipe.
        policy: The precision policy.
        settings: Settings of `autocast`; `None` if nothing is rewritten and arguments are cast.
        has_aux: Whether the loss comes with other results.
        keep: Rules for arguments that are not cast.
        params: Which arguments hold parameters.
        checks: Whether finiteness is computed.
        microbatches: The number of parts in which the batch is processed.
        batch: Rules for the leaves that microbatches split.
        carry: The argument that one microbatch hands to the next.
        microbatch_reduction: How losses and gradients are reduced over the microbatches.
        axes: The mesh axes over which losses and gradients are reduced.
        axis_reduction: How losses and gradients are reduced over the axes.
        wire: The dtype in which gradients are reduced over the axes.
    """

    func: Callable[..., Any]
    scaling: AbstractLossScaling
    recipe_state: F8Scaling | None
    policy: Policy
    settings: Settings | None
    has_aux: bool
    keep: Sequence[str]
    params: tuple[int | str, ...]
    checks: bool
    microbatches: int
    batch: Sequence[str]
    carry: str | None
    microbatch_reduction: Reduction
    axes: tuple[str, ...]
    axis_reduction: Reduction
    wire: np.dtype | None

    def taken(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, AbstractLossScaling, Verdict, Any]:
        """Return the value, the next scaling, the verdict and the gradients."""
        if not args:
            raise TypeError(
                "the gradient is taken with respect to the first positional argument; got "
                f"{', '.join(kwargs) or 'nothing'} by name only. Pass the model by position."
            )
        _check_no_state(args[0])
        # NumPy arrays become JAX arrays here: Equinox does not know NumPy's bfloat16 as inexact.
        params, static = eqx.partition(args[0], eqx.is_inexact_array)
        params = jtu.tree_map(jnp.asarray, params)
        args = (eqx.combine(params, static), *args[1:])
        step = self.over_axes(self.over_microbatches(args, kwargs, params), params)
        return self.judged(step, params)

    def over_microbatches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], params: PyTree
    ) -> _Step:
        """Sum over all microbatches."""
        if self.microbatches == 1:
            return self.one_step(args, kwargs)
        return _Step(
            *accumulate(
                self.one_step,
                Arguments(self.func, args, kwargs),
                vary_tree(params, self.axes),
                microbatches=self.microbatches,
                batch=self.batch,
                carry=self.carry,
                encodes=bool(recipes_of(self.policy.recipe, self.policy.rules)),
            )
        )

    def one_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Step:
        """Differentiate once."""
        # Marked as varying: otherwise JAX would sum the cotangents over the mesh by itself, in the
        # compute dtype, where finite shards can add up to infinity.
        model = vary_tree(args[0], self.axes)
        given, given_kwargs = (model, *args[1:]), kwargs
        if self.settings is None or self.policy.casts_float64:
            # Cast before the differentiated function and not inside it: then no derivative of a
            # cast is traced.
            given, given_kwargs = cast_arguments(
                self.func,
                given,
                kwargs,
                self.policy.compute if self.settings is None else jnp.float32,
                keep=self.keep,
                float64=self.policy.casts_float64,
            )
        low_model, *low = given
        trained = jtu.tree_map(eqx.is_inexact_array, model)
        low_params, static = eqx.partition(low_model, trained)
        state = self.recipe_state
        probes = {} if state is None else vary_tree(state.probes(), self.axes)
        differentiated = eqx.filter_value_and_grad(self.scaled_loss, has_aux=True)
        (_, (loss, aux)), (grads, seen) = differentiated(
            (low_params, probes), static, tuple(low), given_kwargs
        )
        if self.settings is None:
            aux = _restore_aux(aux, self.func, args, kwargs, self.policy)
        return _Step(loss, aux, grads, seen)

    def scaled_loss(
        self,
        moving: tuple[PyTree, dict[str, jax.Array]],
        static: PyTree,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, Any]:
        """Return the scaled loss, and the loss with the auxiliary output."""
        params, probes = moving
        model = eqx.combine(params, static)
        func = self.func
        if self.settings is not None:
            state = None if self.recipe_state is None else self.recipe_state.slots(probes)
            func = rewritten(
                func, self.settings, params=self.params, keep=self.keep, state=state, is_loss=True
            )
        loss, aux = split_result(func(model, *args, **kwargs), self.has_aux)
        loss = _to_float32(loss)
        return self.scaling.scale(loss), (loss, aux)

    def over_axes(self, step: _Step, params: PyTree) -> _Step:
        """Reduce over the axes of a mesh."""
        if not self.axes:
            return step
        return step._replace(
            loss=reduce_value(step.loss, self.axes, self.axis_reduction),
            grads=reduce_gradients(step.grads, params, self.axes, self.wire, self.axis_reduction),
            seen=jtu.tree_map(lambda sizes: jax.lax.pmax(sizes, self.axes), step.seen),
        )

    def judged(self, step: _Step, params: PyTree) -> tuple[Any, AbstractLossScaling, Verdict, Any]:
        """Unscale the gradients, say whether all is finite, and adjust the scaling."""
        scaling, loss = self.scaling, step.loss
        # The verdict is about unscaled gradients, but reads them before they are unscaled. They are
        # narrower there, and the largest magnitude of each leaf, once unscaled, says the same.
        grads = jtu.tree_map(_in_width, step.grads, params)
        sizes = scaling.unscale(magnitudes(grads)) if self.checks else None
        grads = scaling.unscale(jtu.tree_map(_widened, grads, params))
        if self.microbatches > 1 and self.microbatch_reduction == "mean":
            # Multiply by the reciprocal: XLA rewrites a division by a constant that way anyway.
            loss, grads = jtu.tree_map(lambda x: x * (1 / self.microbatches), (loss, grads))
        verdict = unchecked()
        if sizes is not None:
            verdict = judge(agree(finite_flags(sizes, loss), self.axes))
        # First record what was seen under the scale that was applied, then adjust the scale.
        state = self.recipe_state
        adjusted = scaling if state is None else state.observe(step.seen, verdict)
        if sizes is not None or scaling.checks_finite:
            adjusted = adjusted.adjust(verdict)
        return ((loss, step.aux) if self.has_aux else loss), adjusted, verdict, grads


def split_result(result: object, has_aux: bool) -> tuple[Any, Any]:
    """Return the loss and the auxiliary output."""
    if not has_aux:
        return result, None
    if not (isinstance(result, tuple) and len(result) == 2):
        length = f" of length {len(result)}" if isinstance(result, tuple) else ""
        raise TypeError(
            "with has_aux=True the function returns (loss, aux); got "
            f"{type(result).__name__}{length}. Return exactly these two."
        )
    return result


def _check_no_state(model: PyTree) -> None:
    """Raise if the differentiated argument holds state, which is not trained."""
    nodes = jtu.tree_flatten_with_path(model, is_leaf=is_state_node)[0]
    state = [(path, node) for path, node in nodes if is_state_node(node)]
    if state:
        path, node = state[0]
        raise TypeError(
            "the first argument is what is differentiated, and it holds persistent state: "
            f"{type(node).__name__} at `{path_string(path) or 'its root'}`. Pass state as another "
            "argument and return its new value with has_aux=True; for an NNX module, use "
            "halfstep.integrations.nnx.value_and_grad, or nnx.split it."
        )


def _to_float32(loss: PyTree) -> jax.Array:
    """Convert the loss to float32 or wider, so that no scale takes it out of a 16-bit range."""
    if isinstance(loss, float):
        loss = np.float32(loss)
    dtype, shape = getattr(loss, "dtype", None), getattr(loss, "shape", ())
    if dtype is None or shape != () or not jnp.issubdtype(dtype, jnp.floating):
        got = type(loss).__name__ if dtype is None else f"{dtype}{list(shape)}"
        raise TypeError(
            f"the loss must be a real floating-point scalar; got {got}. "
            "Reduce it, for example with jnp.mean; other results go into has_aux=True."
        )
    return jnp.asarray(loss, at_least_float32(dtype))


def _restore_aux(
    aux: PyTree,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy,
) -> PyTree:
    """Give `aux` the dtypes that it has without mixed precision, so that state keeps its dtypes.

    If something in `aux` came out in the compute dtype, the function is traced once more,
    abstractly, with its own dtypes.
    """
    # Tracing the function once more takes time, so it is only done if something came out narrow.
    narrow = policy.compute.itemsize < 4 and any(
        is_castable(leaf) and leaf.dtype == policy.compute for leaf in jtu.tree_leaves(aux)
    )
    if not narrow:
        return aux
    try:
        _, natural = eqx.filter_eval_shape(func, *args, **kwargs)
    except Exception as error:
        why = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
        warnings.warn(
            f"the function cannot be traced at its own dtypes ({why}), so its auxiliary output is "
            f"returned in {dtype_name(policy.output)}, the policy's output dtype. Let the function "
            "take float32, too, or cast the output yourself.",
            stacklevel=2,
        )
        return cast_tree(aux, policy.output)

    def restore(leaf: PyTree, like: PyTree) -> PyTree:
        both = is_castable(leaf) and is_castable(like, float64=True)
        return cast_tree(leaf, like.dtype) if both else leaf

    return jtu.tree_map(restore, aux, natural)


def _in_width(grad: jax.Array, param: jax.Array) -> jax.Array:
    """Convert a gradient to its parameter's dtype if both have one width: values can be lost."""
    return grad.astype(param.dtype) if grad.dtype.itemsize == param.dtype.itemsize else grad


def _widened(grad: jax.Array, param: jax.Array) -> jax.Array:
    """Convert a gradient to its parameter's dtype if that is wider: no value can be lost."""
    return grad.astype(param.dtype) if grad.dtype.itemsize < param.dtype.itemsize else grad
