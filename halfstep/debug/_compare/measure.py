"""Measure the error of a policy against float32, in results and gradients, on some batches."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from halfstep._autocast import Plan, decided, rewritten, settings_of, trace
from halfstep._base import is_array, path_string
from halfstep._policy import Policy, as_policy, recipes_of
from halfstep._program import Graph
from halfstep._training import (
    AbstractLossScaling,
    NoLossScaling,
    StaticLossScaling,
    filter_value_and_grad,
)
from halfstep.debug._compare.distance import distance, sums

Measure = Callable[[Policy], float]
"""A function that returns the error of a policy, as a share."""


class Gradients(NamedTuple):
    """A loss, and its gradients by path."""

    value: jax.Array
    gradients: dict[str, jax.Array]


class Trials:
    """Measures policies, and remembers what it has measured.

    Args:
        func: A loss, or any other function.
        batches: Arguments that it is called with.
        has_aux: Whether a loss returns something else as well.
        measure: Measures a policy, if not by the error of loss and gradients.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        batches: Sequence[Sequence[Any]],
        *,
        has_aux: bool,
        measure: Measure | None,
    ):
        self._func, self._batches, self._has_aux = func, batches, has_aux
        self._measure = measure or self._error
        self._known: dict[Hashable, float] = {}
        self._exact: list[object] | None = None
        self.compiles = 0

    def plan(self, policy: Policy) -> Plan:
        """Plan how the function would run in a policy."""
        settings = settings_of(policy)
        args, kwargs = self._batches[0], {}
        call = trace(self._func, settings, args, kwargs, params=(0,), keep=policy.keep)
        return call.plan

    def without_idle_rules(self, policy: Policy) -> Policy:
        """Return a policy without the rules that decide nothing in the function."""
        return _active(policy, self.plan(policy))

    def error(self, policy: Policy) -> float:
        """Measure the error of a policy, as a share."""
        # Cached by what the policy decides, not by its text: many sets of rules lead to the same
        # program, which need not be compiled twice.
        plan = self.plan(policy)
        key = _signature(plan)
        if key not in self._known:
            self.compiles += 1
            found = float(self._measure(_active(policy, plan)))
            # NaN compares false with everything, and would look like an error within the tolerance.
            self._known[key] = found if np.isfinite(found) else float("inf")
        return self._known[key]

    def _error(self, policy: Policy) -> float:
        if self._exact is None:
            # Computed on first use: a user's own measure needs no float32 run.
            self.compiles += 1
            exact = CompiledAsWritten(self._function(as_policy("f32")))
            self._exact = [exact(*batch) for batch in self._batches]
            _check_finite(self._exact)
        low = CompiledAsWritten(self._function(policy))
        found = [
            _apart(low(*batch), exact)
            for batch, exact in zip(self._batches, self._exact, strict=True)
        ]
        return max(found)

    def _function(self, policy: Policy) -> Callable[..., Any]:
        """Return the function to compare: it returns loss and gradients, or `func`'s results."""
        if not is_loss(self.plan(policy).graph, self._has_aux):
            settings = settings_of(policy)
            return rewritten(self._func, settings, params=(0,), keep=policy.keep)
        recipe, state = policy.recipe, None
        recipes = recipes_of(recipe, policy.rules)
        if recipe is not None and any(one.needs_state for one in recipes):
            # A fixed key, so that two policies differ by their decisions and not by chance.
            key = {"key": jax.random.key(0)} if any(one.is_random for one in recipes) else {}
            state = recipe.init(self._func, *self._batches[0], policy=policy, **key)
        return gradients_of(self._func, policy, state, has_aux=self._has_aux)


def _check_finite(exact: Sequence[object]) -> None:
    for number, made in enumerate(exact):
        arrays = jax.tree.leaves(eqx.filter(made, eqx.is_inexact_array))
        if not all(np.isfinite(array).all() for array in arrays):
            raise ValueError(
                f"the function is not finite in float32 for batch {number}: there is nothing to "
                "compare with. Ask `debug.first_nonfinite` where it begins."
            )


def _apart(low: object, exact: object) -> float:
    """Return the largest error: of a loss, of all gradients together, or of any array in a tree."""
    if isinstance(low, Gradients) and isinstance(exact, Gradients):
        pairs = [[(low.value, exact.value)]]
        pairs.append([(low.gradients[path], value) for path, value in exact.gradients.items()])
    else:
        results = [jax.tree.leaves(eqx.filter(x, eqx.is_inexact_array)) for x in (low, exact)]
        pairs = [[pair] for pair in zip(*results, strict=True)]
    return max(distance([_row(*pair) for pair in together]).error for together in pairs)


# Jitted, because every trial calls it for every parameter.
@jax.jit
def _row(low: jax.Array, exact: jax.Array) -> jax.Array:
    return sums(jnp.asarray(low), jnp.asarray(exact))


def _active(policy: Policy, plan: Plan) -> Policy:
    # `autocast` raises for rules that match nothing, and in a search some rules make others
    # redundant.
    decisions = [owner.decisions[index] for owner, index in decided(plan)]
    used = {decision.by for decision in decisions}
    used |= {decision.recipe_by for decision in decisions}
    return policy.replace(rules=[rule for rule in policy.rules if str(rule) in used])


def _signature(plan: Plan) -> Hashable:
    """Return a key that two policies share if the function runs the same way in both."""
    return tuple(
        (one.rule, one.dtype, one.outs, one.site and one.site.recipe, one.inner is None)
        for owner, index in decided(plan)
        for one in [owner.decisions[index]]
    )


def is_loss(graph: Graph, has_aux: bool) -> bool:
    """Return whether a function returns one number that has a gradient."""
    outs = [graph.aval(out) for out in graph.outputs]
    alone = len(outs) == 1 or (has_aux and outs)
    return bool(alone) and outs[0].shape == () and jnp.issubdtype(outs[0].dtype, jnp.floating)


def scaling_for(policy: Policy, scaling: AbstractLossScaling | None) -> AbstractLossScaling:
    """Return the given loss scaling, or a default one for the policy."""
    if scaling is not None:
        return scaling
    # The scale that `DynamicLossScaling` starts with. Without it, underflow in the gradients would
    # dominate float16's error.
    is_narrow = policy.compute == np.dtype(np.float16)
    return StaticLossScaling(2.0**15) if is_narrow else NoLossScaling()


def gradients_of(
    func: Callable[..., Any],
    policy: Policy,
    scaling: AbstractLossScaling | None,
    *,
    has_aux: bool,
) -> Callable[..., Gradients]:
    """Make a function of a loss's arguments that returns the loss's value and gradients.

    Args:
        func: The loss.
        policy: The policy in which the loss is computed.
        scaling: A loss scaling, or the state of the policy's recipe.
        has_aux: Whether the loss returns something else as well.
    """
    transform = filter_value_and_grad(
        func, scaling_for(policy, scaling), policy=policy, has_aux=has_aux
    )

    def made(*args: Any, **kwargs: Any) -> Gradients:
        value, _, _, grads = transform(*args, **kwargs)
        leaves, _ = jtu.tree_flatten_with_path(eqx.filter(grads, eqx.is_inexact_array))
        named = {path_string(path) or "params": leaf for path, leaf in leaves}
        return Gradients(value[0] if has_aux else value, named)

    return made


class CompiledAsWritten:
    """A function that is compiled so that every operation is rounded as it is written.

    Where XLA may keep more bits than a dtype has, as on CPUs, values that overflow elsewhere do not
    overflow. The compiled program is freed with this object: a search compiles hundreds of
    programs, and Equinox's `filter_jit` keeps every program that it ever compiled.
    """

    def __init__(self, func: Callable[..., Any]):
        self._func = func
        # Anything that is not an array is part of the program and triggers a new compilation when
        # it changes.
        self._static: Any = None
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and return the arrays of its result."""
        arrays, static = eqx.partition((args, kwargs), is_array)
        if self._run is None or not eqx.tree_equal(static, self._static):
            func = self._func

            def run(arrays: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
                args, kwargs = eqx.combine(arrays, static)
                return eqx.filter(func(*args, **kwargs), eqx.is_array)

            options: Any = {"xla_allow_excess_precision": False}
            self._static, self._run = static, jax.jit(run, compiler_options=options)
        return self._run(arrays)
