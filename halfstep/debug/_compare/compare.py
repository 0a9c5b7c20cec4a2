"""`compare`: run a function in a policy and in float32, and report where they differ."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue

from halfstep._autocast import (
    Kind,
    Plan,
    body_plans,
    check_state,
    held_dtype,
    placed,
    settings_of,
    trace,
)
from halfstep._base import checked
from halfstep._explain import name_of
from halfstep._policy import Policy, as_policy
from halfstep._training import AbstractLossScaling, F8Scaling
from halfstep.debug._compare.added_error import Errors
from halfstep.debug._compare.comparison_report import Comparison, Deviation, GradientDeviation
from halfstep.debug._compare.distance import distance, sums, was_computed
from halfstep.debug._compare.measure import CompiledAsWritten, gradients_of, is_loss, scaling_for
from halfstep.debug._compare.side_by_side import Pair, run_both
from halfstep.debug._instrument.body import Body, body_of
from halfstep.debug._instrument.layout import Layout, Sites, layout_for


@checked
def compare(
    func: Callable[..., Any],
    policy: Policy | str = "bf16",
    *,
    sites: Sites = "scopes",
    scaling: Any = None,
    has_aux: bool = False,
    gradients: bool = True,
) -> Callable[..., Comparison]:
    """Report where a function in a policy departs from the same function in float32.

    Both versions run side by side in one compiled program, operation by operation, each on its own
    values. The error of a site is therefore the error that training has there. Precision is lost at
    a site whose error is much larger than the error of the values that it is computed from. For a
    loss, the gradients are compared as well. Every operation is rounded as it is written, even
    where XLA might keep more bits.

    Args:
        func: A loss, or any other function of parameters, as gradient transforms take it.
        policy: A `Policy` or its string.
        sites: Which values are compared: `"scopes"`, the values passed from one line or one
            `jax.named_scope` to another; `"ops"`, the result of every operation; or a function of a
            `debug.Site` that returns whether to compare it.
        scaling: A loss scaling, or the state of the policy's recipe. Without it, the loss is scaled
            by 2^15 if the compute dtype is float16.
        has_aux: Whether the function returns a loss and something else.
        gradients: Whether the gradients of a loss are compared.

    Returns:
        A function of the same arguments, which returns a `debug.Comparison`.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def loss(w, x):
            spread = x @ w
            return jnp.mean(jnp.tanh(spread - 1000.0))


        batch = jnp.ones(8), jnp.full((4, 8), 125.1)
        report = halfstep.debug.compare(loss, "bf16", sites="ops")(*batch)
        worst = report.worst[0]
        assert worst.site.op == "sub"
        assert worst.error > 0.5 and worst.before < 0.01
        ```
    """
    policy = as_policy(policy)
    settings = settings_of(policy)
    if settings.compute.itemsize >= 4:
        raise ValueError(
            f"required a policy of 16 bits or fewer, to compare with float32; got {str(policy)!r}. "
            "Write 'bf16', 'f16' or a recipe such as 'f8'."
        )
    scaling = scaling_for(policy, scaling)
    state = scaling.slots(scaling.probes()) if isinstance(scaling, F8Scaling) else None
    check_state(policy, has_state=state is not None)

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        call = trace(func, settings, args, kwargs, params=(0,), keep=policy.keep)
        plan, body = call.plan, body_of(call.program, call.paths, frozenset())
        layout = layout_for(body, sites)
        slots = None if state is None else placed(plan, state)

        def both(
            arrays: Sequence[jax.Array], slots: Mapping[int, Any] | None
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            outs = [Kind.WIDE] * len(plan.graph.outputs)
            wide = [
                jnp.asarray(x, plan.graph.avals[n].dtype)
                for n, x in zip(plan.graph.inputs, arrays, strict=True)
            ]
            given = list(map(Pair, arrays, wide))
            made, rows = run_both(layout, body, plan, given, outs, slots)
            pairs = zip(made, plan.graph.outputs, strict=True)
            of_results = [sums(*value) for value, out in pairs if _is_float(plan.graph.aval(out))]
            return of_results, rows

        of_results, rows = CompiledAsWritten(both)(call.arrays, slots)
        deviations = _deviations(layout, plan, [np.asarray(row) for row in rows])
        # Gradients come from the transform that training uses, loss scaling included, in a program
        # of their own: the side-by-side run has only the forward pass.
        of_gradients: tuple[GradientDeviation, ...] = ()
        if gradients and is_loss(plan.graph, has_aux):
            of_gradients = _of_gradients(func, policy, scaling, has_aux, args, kwargs)
        return Comparison(str(policy), distance(of_results), deviations, of_gradients)

    return compared


def _is_float(aval: AbstractValue) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", bool), jnp.floating)


def _deviations(layout: Layout, plan: Plan, rows: Sequence[np.ndarray]) -> tuple[Deviation, ...]:
    """Return the deviation of each site that was computed."""
    errors, plans = Errors(layout, rows), dict(_plans(layout.body, plan))
    made = []
    for number, (site, row) in enumerate(zip(layout.sites, rows, strict=True)):
        if not was_computed(row):
            continue
        of_site = distance(row)
        body, value = layout.owners[number]
        owner, held = plans.get(body), None
        if owner is not None:
            compute = owner.settings.compute
            held = held_dtype(owner.graph.avals[value], owner.kinds[value], compute)
        name = site.type.dtype if held is None else name_of(held)
        made.append(Deviation(site, name, of_site.error, of_site.cosine, *errors.added(number)))
    return tuple(made)


def _plans(body: Body, plan: Plan) -> Iterator[tuple[Body, Plan]]:
    """Yield each function of a program with its plan."""
    yield body, plan
    for index, bodies in body.inner.items():
        inside = body_plans(plan.graph.nodes[index], plan.decisions[index])
        # Operations that the policy does not look into have no plans; their sites keep the traced
        # dtype.
        for pair in zip(bodies, inside, strict=False):
            yield from _plans(*pair)


def _of_gradients(
    func: Callable[..., Any],
    policy: Policy,
    scaling: AbstractLossScaling,
    has_aux: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[GradientDeviation, ...]:
    low = gradients_of(func, policy, scaling, has_aux=has_aux)
    wide = gradients_of(func, as_policy("f32"), None, has_aux=has_aux)

    def both(*args: Any, **kwargs: Any) -> dict[str, jax.Array]:
        pairs = [made(*args, **kwargs).gradients for made in (low, wide)]
        return {path: sums(pairs[0][path], value) for path, value in pairs[1].items()}

    found = CompiledAsWritten(both)(*args, **kwargs)
    return tuple(
        GradientDeviation(path, tuple(float(x) for x in np.asarray(row)))
        for path, row in found.items()
    )
