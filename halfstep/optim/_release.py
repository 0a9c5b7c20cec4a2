"""Gradient release: step every layer as soon as its gradient is computed."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float32, PyTree

from halfstep._base import at_least_float32, checked, is_inexact
from halfstep._training import (
    AbstractLossScaling,
    NoLossScaling,
    StepsInPlace,
    Verdict,
    apply_gradients,
    finite_flags,
    judge,
    magnitudes,
    select_tree,
)
from halfstep.optim import _release_check as check
from halfstep.optim._release_stack import backward, forward, put, take
from halfstep.optim._state import StateError


class ReleaseState(NamedTuple):
    """The state of the optimizer of a released step.

    Example:
        ```python
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        step = optim.release(
            lambda layer, x, outer, batch: layer * x,
            optax.sgd(0.1, momentum=0.9),
            first=lambda outer, batch: outer * batch,
            last=lambda outer, x, batch: jnp.mean(x**2),
        )
        state = step.init({"outer": jnp.ones(2), "layers": jnp.ones((3, 2))})
        assert isinstance(state, optim.ReleaseState)
        assert state.layers[0].trace.shape == (3, 2)
        ```
    """

    outer: Any
    """The state of the parameters outside the stack."""
    layers: Any
    """The state of the layers: every array has a first axis of layers."""


class _Pass(NamedTuple):
    """The results of the forward pass that the backward pass needs."""

    loss: Any
    layers: Any
    """Trained arrays of the stack."""
    outer: Any
    """Trained arrays outside the stack."""
    back: Callable[..., tuple[Any, list[Any], Any]]
    """The backward pass through the layers."""
    used: Sequence[bool]
    """Whether the layers use each array outside the stack."""
    from_last: Any
    """The gradients that `last` gives to the parameters outside the stack."""
    to_first: Callable[[Any], Any]
    """Maps the cotangent of the first layer's input to the gradients that `first` gives to the
    parameters outside the stack."""


@dataclasses.dataclass(frozen=True, eq=False)
class Release:
    """A training step that `release` has made. Call it as `step(params, state, batch)`.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        import optax
        from halfstep import optim

        step = optim.release(
            lambda layer, x, outer, batch: layer * x,
            optax.sgd(0.1),
            first=lambda outer, batch: outer * batch,
            last=lambda outer, x, batch: jnp.mean(x**2),
        )
        params = {"outer": jnp.ones(2), "layers": jnp.ones((3, 2))}
        loss, params, state = jax.jit(step)(params, step.init(params), jnp.ones(2))
        assert loss == 1 and (params["layers"] < 1).all()
        ```
    """

    layer: Callable[..., Any]
    tx: optax.GradientTransformation
    first: Callable[..., Any]
    last: Callable[..., Any]
    clip: Any
    per_layer_clip: Any

    def init(self, params: Any) -> ReleaseState:
        """Make the optimizer's state for parameters as they are.

        Args:
            params: `{"outer": ..., "layers": ...}`.
        """
        check.check_params(params)
        trained = eqx.filter(params, is_inexact)
        return ReleaseState(
            self.tx.init(trained["outer"]), jax.vmap(self.tx.init)(trained["layers"])
        )

    def prepare(self, params: Any) -> tuple[Any, ReleaseState]:
        """Make parameters to compute with and a state, with the optimizer's own `prepare`.

        Args:
            params: `{"outer": ..., "layers": ...}`, in float32.
        """
        check.check_params(params)
        prepare = getattr(self.tx, "prepare", None)
        if prepare is None:
            raise TypeError(
                "only compressed optimizers such as flash_adamw have `prepare`; got "
                f"{type(self.tx).__name__}, which takes parameters as they are: call `init`."
            )
        trained, frozen = eqx.partition(params, is_inexact)
        outer, outer_state = prepare(trained["outer"])
        layers, layers_state = jax.vmap(prepare)(trained["layers"])
        made = eqx.combine({"outer": outer, "layers": layers}, frozen)
        return made, ReleaseState(outer_state, layers_state)

    def __call__(self, params: Any, state: Any, batch: Any, scaling: Any = None) -> tuple[Any, ...]:
        """Run one training step.

        Args:
            params: `{"outer": ..., "layers": ...}`.
            state: The state that `init`, `prepare` or the previous step returned.
            batch: The batch, which `first`, `last` and every layer get.
            scaling: A loss scaling of halfstep's. If it checks finiteness, gradients are computed
                twice, and nothing changes unless all gradients and the loss are finite.

        Returns:
            `(loss, params, state)`; with a scaling `(loss, params, state, scaling, finite)`.
        """
        length = check.check_params(params)
        if not isinstance(state, ReleaseState):
            raise StateError(
                "the state must be a ReleaseState, as this step's `init` or `prepare` returns it; "
                f"got {type(state).__name__}."
            )
        check.check_stacked(state.layers, length)
        by = _scaling(scaling)
        done = self._forward(params, batch, by)
        if self.clip is None and not by.checks_finite:
            new, state = self._in_one(done, state, by)
            verdict = Verdict(None, None, None)
        else:
            new, state, verdict = self._in_two(done, state, by, length)
        params = eqx.combine(new, params)
        if scaling is None:
            return done.loss, params, state
        return done.loss, params, state, by.adjust(verdict), verdict

    def _forward(self, params: PyTree, batch: PyTree, by: AbstractLossScaling) -> _Pass:
        trained, frozen = eqx.partition(params, is_inexact)
        trained = jax.tree.map(jnp.asarray, trained)

        # `first` is recomputed in the backward pass, as the layers are, so that none of its
        # residuals are kept while the layers run.
        @jax.checkpoint
        def first(outer: PyTree) -> PyTree:
            return self.first(eqx.combine(outer, frozen["outer"]), batch)

        def call(layer: PyTree, x: PyTree, outer: PyTree) -> PyTree:
            return self.layer(layer, x, eqx.combine(outer, frozen["outer"]), batch)

        def last(outer: PyTree, x: PyTree) -> tuple[jax.Array, jax.Array]:
            loss = check.check_loss(self.last(eqx.combine(outer, frozen["outer"]), x, batch))
            return by.scale(loss), loss

        x, first_pull = jax.vjp(first, trained["outer"])
        check.check_input(x)
        layers = eqx.combine(trained["layers"], frozen["layers"])
        used = _used(call, layers, x, trained["outer"])
        x, inputs = forward(call, layers, x, trained["outer"])
        scaled, last_pull, loss = jax.vjp(last, trained["outer"], x, has_aux=True)
        from_last, ct = last_pull(jnp.ones_like(scaled))

        def back(*, by_outer: bool, **options: Any) -> Any:
            chosen = used if by_outer else [False] * len(used)
            return backward(call, frozen["layers"], inputs, trained["outer"], chosen, ct, **options)

        return _Pass(
            loss,
            trained["layers"],
            trained["outer"],
            back,
            used,
            from_last,
            lambda ct: first_pull(ct)[0],
        )

    # One backward pass steps each layer as soon as its gradient is computed. Two passes are needed
    # if a step depends on all gradients: on their norm, or on a verdict. The first pass then only
    # reduces the gradients to numbers; the second recomputes the gradients and steps.

    def _in_one(
        self, done: _Pass, state: ReleaseState, by: AbstractLossScaling
    ) -> tuple[PyTree, ReleaseState]:
        ct, sums, (layers, layers_state) = self._apply(done, state.layers, by, by_outer=True)
        grads = self._clipped(by.unscale(_outer_grads(done, sums, ct)))
        outer, outer_state = _stepped(self.tx, done.outer, state.outer, grads, None)
        return {"outer": outer, "layers": layers}, ReleaseState(outer_state, layers_state)

    def _in_two(
        self, done: _Pass, state: ReleaseState, by: AbstractLossScaling, length: int
    ) -> tuple[PyTree, ReleaseState, Verdict]:
        grads, norm, verdict = self._judge(done, by, length)
        if norm is not None:
            # Squares of finite gradients may overflow. Clipping by such a norm would make every
            # gradient zero.
            both = jnp.logical_and(jnp.asarray(verdict), jnp.isfinite(norm))
            verdict = dataclasses.replace(verdict, finite=both)
        finite = verdict.finite
        factors = None if norm is None else _factor(norm, self.clip)
        _, _, (layers, layers_state) = self._apply(
            done, state.layers, by, by_outer=False, factors=factors, finite=finite
        )
        grads = self._clipped(grads, factors)
        outer, outer_state = _stepped(self.tx, done.outer, state.outer, grads, finite)
        made = {"outer": outer, "layers": layers}
        return made, ReleaseState(outer_state, layers_state), verdict

    def _judge(
        self, done: _Pass, by: AbstractLossScaling, length: int
    ) -> tuple[PyTree, jax.Array | None, Verdict]:
        """Run a first backward pass.

        It computes the gradients outside the stack, the norm of all gradients, and a verdict.
        """

        def visit(
            carry: tuple[jax.Array, jax.Array], number: jax.Array, grads: PyTree
        ) -> tuple[Any, Any]:
            sums, flags = carry
            flags = flags & jnp.isfinite(by.unscale(magnitudes(grads)))
            if self.clip is None:
                return sums, flags
            more = _squares(by.unscale(grads))
            return jax.lax.dynamic_update_index_in_dim(sums, more, number, 0), flags

        count = len(jax.tree.leaves(done.layers))
        begin = jnp.zeros(length, jnp.float32), jnp.ones(count, bool)
        ct, sums, (by_layer, flags) = done.back(
            by_outer=True,
            visit=visit,
            stack=begin,
            layer_of=lambda _, number: take(done.layers, number),
        )
        raw = _outer_grads(done, sums, ct)
        grads = by.unscale(raw)
        # The flags are in the order of the parameters' leaves: a verdict names leaves by number.
        outside = finite_flags(by.unscale(magnitudes(raw)), done.loss)
        verdict = judge(jnp.concatenate([flags, outside]))
        norm = None if self.clip is None else jnp.sqrt(jnp.sum(by_layer) + _squares(grads))
        return grads, norm, verdict

    def _apply(
        self,
        done: _Pass,
        state: PyTree,
        by: AbstractLossScaling,
        *,
        by_outer: bool,
        factors: Float32[Array, ""] | None = None,
        finite: jax.Array | None = None,
    ) -> Any:
        """Run the backward pass that steps the layers."""

        def visit(stack: PyTree, number: jax.Array, grads: PyTree) -> Any:
            grads = self._clipped(by.unscale(grads), factors)
            layer, layer_state = take(stack, number)
            return put(stack, _stepped(self.tx, layer, layer_state, grads, finite), number)

        return done.back(
            by_outer=by_outer,
            visit=visit,
            stack=(done.layers, state),
            layer_of=lambda stack, number: take(stack[0], number),
        )

    def _clipped(self, grads: PyTree, by: Float32[Array, ""] | None = None) -> PyTree:
        if self.per_layer_clip is not None:
            by = _factor(jnp.sqrt(_squares(grads)), self.per_layer_clip)
        return grads if by is None else _multiply(grads, by)


@checked
def release(
    layer: Any,
    tx: Any,
    *,
    first: Any,
    last: Any,
    clip: Any = None,
    per_layer_clip: Any = None,
) -> Release:
    """Make a training step that never holds the gradients of all layers at once.

    The layers of a stack are one function over parameters with a first axis of layers, as for
    `jax.lax.scan`. The backward pass recomputes, differentiates and steps each layer before the
    next one; only the input of each layer is kept. The result equals, bit for bit, that of
    computing all gradients first and then stepping each layer by itself.

    Args:
        layer: `layer(layer_params, x, outer, batch)` returns the next `x`, of the same structure,
            shapes and dtypes.
        tx: A compressed optimizer such as `flash_adamw`, or any Optax optimizer. Each layer is
            stepped by itself, with its own state, and so are the parameters outside the stack. A
            quantity that the optimizer computes over all parameters is therefore computed over
            one layer, or over the parameters outside.
        first: `first(outer, batch)` returns the input of the first layer.
        last: `last(outer, x, batch)` returns the loss.
        clip: The largest norm of all gradients together. It takes a second backward pass through
            the layers, at the same peak memory. A step whose norm is not finite is skipped.
        per_layer_clip: The largest norm of the gradients of one layer, and of the parameters
            outside the stack. It takes no second pass.

    Returns:
        A step: `loss, params, state = step(params, state, batch)`, where `params` is
        `{"outer": ..., "layers": ...}`. With a loss scaling,
        `loss, params, state, scaling, finite = step(params, state, batch, scaling)`. The step also
        has `init` and `prepare`.

    Example:
        ```python
        import jax
        import jax.numpy as jnp
        from halfstep import optim


        def layer(params, x, outer, batch):
            return x + jnp.tanh(x @ params["w"])


        step = optim.release(
            layer,
            optim.flash_adamw(1e-3),
            first=lambda outer, batch: batch[0] @ outer["enter"],
            last=lambda outer, x, batch: jnp.mean((x @ outer["enter"].T - batch[1]) ** 2),
        )
        params = {
            "outer": {"enter": jax.random.normal(jax.random.key(0), (8, 64)) / 8},
            "layers": {"w": jnp.zeros((12, 64, 64))},
        }
        params, state = step.prepare(params)
        batch = jnp.ones((4, 8)), jnp.zeros((4, 8))
        before, params, state = jax.jit(step, donate_argnums=(0, 1))(params, state, batch)
        after, params, state = jax.jit(step, donate_argnums=(0, 1))(params, state, batch)
        assert after < before
        ```
    """
    check.check_function(layer, "layer", "layer(layer_params, x, outer, batch)")
    check.check_function(first, "first", "first(outer, batch)")
    check.check_function(last, "last", "last(outer, x, batch)")
    if not callable(getattr(tx, "init", None)) or not callable(getattr(tx, "update", None)):
        raise TypeError(
            "`tx` must be an optimizer with `init` and `update`, such as "
            f"optim.flash_adamw(1e-3); got {type(tx).__name__}."
        )
    if clip is not None and per_layer_clip is not None:
        raise ValueError(
            "pass `clip` or `per_layer_clip`, not both: they are two kinds of norm; got "
            f"clip={clip!r} and per_layer_clip={per_layer_clip!r}."
        )
    check.check_limit(clip, "clip")
    check.check_limit(per_layer_clip, "per_layer_clip")
    return Release(layer, tx, first, last, clip, per_layer_clip)


def _scaling(scaling: object) -> AbstractLossScaling:
    if scaling is None:
        return NoLossScaling()
    if not isinstance(scaling, AbstractLossScaling):
        raise TypeError(
            "`scaling` must be a DynamicLossScaling, StaticLossScaling or NoLossScaling; got "
            f"{type(scaling).__name__}."
        )
    return scaling


def _used(call: Callable[..., Any], layers: PyTree, x: PyTree, outer: PyTree) -> list[bool]:
    """Return which parameters outside the stack a layer uses, and check the layer's output.

    Parameters that no layer uses get no gradient from the layers: see `backward`.
    """
    leaves, treedef = jax.tree.flatten(outer)

    def run(outer: Sequence[Any], layer: PyTree, x: PyTree) -> PyTree:
        return call(layer, x, treedef.unflatten(outer))

    one = jax.tree.map(lambda leaf: jax.eval_shape(lambda stacked: stacked[0], leaf), layers)
    traced, shape = jax.make_jaxpr(run, return_shape=True)(leaves, one, x)
    check.check_layer(x, shape)
    jaxpr = traced.jaxpr
    read = {id(var) for equation in jaxpr.eqns for var in equation.invars}
    read |= {id(var) for var in jaxpr.outvars}
    return [id(var) in read for var in jaxpr.invars[: len(leaves)]]


def _outer_grads(done: _Pass, sums: Sequence[Any], ct: PyTree) -> PyTree:
    """Sum the gradients outside the stack: from `last`, from the layers and from `first`.

    They are summed in the order of the backward pass, so that rounding is the same as in
    `jax.grad`.
    """
    leaves, treedef = jax.tree.flatten(done.from_last)
    rest = iter(sums)
    pairs = zip(leaves, done.used, strict=True)
    summed = [leaf + next(rest) if is_used else leaf for leaf, is_used in pairs]
    return jax.tree.map(jnp.add, treedef.unflatten(summed), done.to_first(ct))


def _stepped(
    tx: optax.GradientTransformation,
    params: PyTree,
    state: PyTree,
    grads: PyTree,
    finite: jax.Array | None,
) -> tuple[PyTree, PyTree]:
    """Step some parameters by themselves."""
    if isinstance(tx, StepsInPlace):
        new = tx.step(params, state, grads, finite=finite)
    else:
        new = apply_gradients(params, tx, state, grads)
    check.check_step((params, state), new)
    if finite is None or isinstance(tx, StepsInPlace):
        # An optimizer that steps in place has already skipped the step if it had to.
        return new
    return select_tree(finite, new, (params, state))


def _squares(grads: PyTree) -> Float32[Array, ""]:
    """Sum the squares of all gradients, in float32."""
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(grads):
        real = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
        total = sum((jnp.sum(jnp.square(part.astype(jnp.float32))) for part in real), total)
    return total


def _factor(norm: Float32[Array, ""], limit: ArrayLike) -> Float32[Array, ""]:
    """Return the factor that makes a norm at most `limit`: 1 if the norm already is."""
    limit = jnp.asarray(limit, jnp.float32)
    # Dividing by the larger of the two keeps the divisor above zero and the factor at most one.
    return limit / jnp.maximum(norm, limit)


def _multiply(grads: PyTree, by: Float32[Array, ""]) -> PyTree:
    """Multiply gradients by a factor in float32; the gradients keep their dtypes."""

    def of(leaf: jax.Array) -> jax.Array:
        wide = at_least_float32(leaf.dtype)
        return (leaf.astype(wide) * by.astype(wide)).astype(leaf.dtype)

    return jax.tree.map(of, grads)
