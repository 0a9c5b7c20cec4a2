"""One gradient in mixed precision: rewrite, scale, differentiate, reduce, unscale, judge."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from halfstep._autocast import rewritten
from halfstep._base import (
    Arguments,
    at_least_float32,
    dtype_name,
    is_state_node,
    path_string,
)
from halfstep._policy import Policy, cast_arguments, cast_tree, is_castable
from halfstep._training.collective import (
    Reduction,
    agree,
    reduce_gradients,
    reduce_value,
    vary_tree,
)
from halfstep._training.f8_scaling import F8Scaling
from halfstep._training.microbatch import accumulate
from halfstep._training.scaling import AbstractLossScaling
from halfstep._training.verdict import Verdict, finite_flags, judge, magnitudes, unchecked


class _Step(NamedTuple):
    """What one pass over a batch, or over all microbatches, gives; gradients are still scaled."""

    loss: Any
    aux: Any
    grads: Any
    seen: Any
    """Magnitudes of what a recipe with state quantized."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Gradient:
    """A gradient with its options, checked. `taken` is the whole, the other methods are its steps.

    Attributes:
        func: The loss.
        scaling: Scales it.
        recipe_state: The same, if it also carries the state of a recipe.
        policy: What is asked for.
        settings: Of `autocast`; `None` if nothing is rewritten and arguments are cast instead.
        has_aux: Whether the loss comes with other results.
        keep: Rules for arguments that are not cast.
        params: Which arguments hold parameters.
        checks: Whether finiteness is computed.
        microbatches: In how many turns.
        batch: Rules for what they split.
        carry: The argument that one hands to the next.
        microbatch_reduction: How their losses and gradients are reduced.
        axes: Of the mesh, over which both are reduced.
        axis_reduction: How.
        wire: The dtype in which gradients cross them.
    """

    func: Callable[..., Any]
    scaling: AbstractLossScaling
    recipe_state: F8Scaling | None
    policy: Policy
    settings: Any
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
        """Value, the next scaling, the verdict, and the gradients."""
        if not args:
            raise TypeError(
                "the gradient is taken with respect to the first positional argument, and there "
                "is none: pass the model by position."
            )
        _check_no_state(args[0])
        # NumPy arrays become JAX's here: Equinox does not know NumPy's bfloat16 as inexact.
        params, static = eqx.partition(args[0], eqx.is_inexact_array)
        params = jtu.tree_map(jnp.asarray, params)
        args = (eqx.combine(params, static), *args[1:])
        step = self.over_axes(self.over_microbatches(args, kwargs, params), params)
        return self.judged(step, params)

    def over_microbatches(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], params: Any
    ) -> _Step:
        """The sums over all microbatches."""
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
            )
        )

    def one_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Step:
        """Differentiate once."""
        # Marked as varying: JAX would else sum the cotangents over the mesh by itself, in the
        # compute dtype, where finite shards can add up to infinity.
        model = vary_tree(args[0], self.axes)
        given, given_kwargs = (model, *args[1:]), kwargs
        if self.settings is None or self.policy.casts_float64:
            # Before, not inside, of what is differentiated: a cast has no derivative to trace.
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
        self, moving: tuple[Any, Any], static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any]:
        """The scaled loss, and the loss with what comes along; differentiated by `moving`."""
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

    def over_axes(self, step: _Step, params: Any) -> _Step:
        """The sums over the axes of a mesh."""
        if not self.axes:
            return step
        return step._replace(
            loss=reduce_value(step.loss, self.axes, self.axis_reduction),
            grads=reduce_gradients(step.grads, params, self.axes, self.wire, self.axis_reduction),
            seen=jtu.tree_map(lambda sizes: jax.lax.pmax(sizes, self.axes), step.seen),
        )

    def judged(self, step: _Step, params: Any) -> tuple[Any, AbstractLossScaling, Verdict, Any]:
        """Unscale the gradients, say whether all is finite, and adjust the scaling."""
        scaling, loss = self.scaling, step.loss
        # Judged by what they will be when unscaled, and read before: narrower, and once less.
        grads = jtu.tree_map(_in_width, step.grads, params)
        sizes = scaling.unscale(magnitudes(grads)) if self.checks else None
        grads = scaling.unscale(jtu.tree_map(_widened, grads, params))
        if self.microbatches > 1 and self.microbatch_reduction == "mean":
            # The reciprocal, written out: XLA makes it of a division by a constant anyway.
            loss, grads = jtu.tree_map(lambda x: x * (1 / self.microbatches), (loss, grads))
        verdict = unchecked()
        if sizes is not None:
            verdict = judge(agree(finite_flags(sizes, loss), self.axes))
        # What was seen, by the scale that was applied; then the next one.
        state = self.recipe_state
        adjusted = scaling if state is None else state.observe(step.seen, verdict)
        if sizes is not None or scaling.checks_finite:
            adjusted = adjusted.adjust(verdict)
        return ((loss, step.aux) if self.has_aux else loss), adjusted, verdict, grads


def split_result(result: Any, has_aux: bool) -> tuple[Any, Any]:
    """The loss and what comes along with it."""
    if not has_aux:
        return result, None
    if not (isinstance(result, tuple) and len(result) == 2):
        length = f" of length {len(result)}" if isinstance(result, tuple) else ""
        raise TypeError(
            "with has_aux=True the function returns (loss, aux); got "
            f"{type(result).__name__}{length}. Return exactly these two."
        )
    return result


def _check_no_state(model: Any) -> None:
    """Raise if the differentiated argument holds state, which is not what anybody trains."""
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


def _to_float32(loss: Any) -> jax.Array:
    """The loss as float32 (or wider), so that no scale can push it out of a 16-bit range."""
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
    aux: Any,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy,
) -> Any:
    """Give `aux` the dtypes it has without mixed precision: state and metrics stay what they were.

    The function is traced once more, abstractly, at its own dtypes; only if something in `aux`
    came out in the compute dtype.
    """
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

    def restore(leaf: Any, like: Any) -> Any:
        both = is_castable(leaf) and is_castable(like, float64=True)
        return cast_tree(leaf, like.dtype) if both else leaf

    return jtu.tree_map(restore, aux, natural)


def _in_width(grad: jax.Array, param: jax.Array) -> jax.Array:
    """A gradient in its parameter's dtype if they are of one width, where numbers can be lost."""
    return grad.astype(param.dtype) if grad.dtype.itemsize == param.dtype.itemsize else grad


def _widened(grad: jax.Array, param: jax.Array) -> jax.Array:
    """A gradient in its parameter's dtype if that is wider, where none can."""
    return grad.astype(param.dtype) if grad.dtype.itemsize < param.dtype.itemsize else grad
