"""A contraction in 8 or 4 bits: how it is written, and the state that it runs with."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from halfstep._autocast import Plan, Site, Slot, named_sites, rewritten
from halfstep._policy import Factor, Leg, Policy, Recipe


def factor_dtypes(site: Site) -> tuple[np.dtype, np.dtype]:
    """The formats of both factors of the forward product, in their order."""
    activation, weight = (factor.dtype for factor in site.recipe.forward)
    return (activation, weight) if site.weight == 1 else (weight, activation)


def multiplies(site: Site) -> bool:
    """Whether the elements themselves are multiplied, and not what they stand for in 16 bits."""
    factors = site.recipe.forward
    if site.contraction is jax.lax.dot_general_p:
        return not any(factor.is_blocked for factor in factors)
    return all(factor.per == "tensor" for factor in factors)


def described(site: Site, compute: str) -> str:
    """How a product is written on its legs: `f8: e4m3, gradients e5m2, per tensor`."""
    recipe = site.recipe
    parts = [_elements(recipe.forward)]
    legs = (
        ("input", recipe.input_gradient, 0),
        ("weight", recipe.weight_gradient, 1),
    )
    gradients = {name: compute if leg is None else leg[place].element for name, leg, place in legs}
    if len(set(gradients.values())) == 1:
        parts += [f"gradients {found}" for found in set(gradients.values()) - {parts[0]}]
    else:
        parts += [
            f"{name} gradient {found}" for name, found in gradients.items() if found != parts[0]
        ]
    if not multiplies(site):
        parts.append(f"multiplied in {compute}")
    parts.append(" x ".join(dict.fromkeys(_scales(factor) for factor in recipe.forward)))
    return f"{recipe.name}: {', '.join(parts)}"


def _elements(leg: Leg) -> str:
    return " x ".join(dict.fromkeys(factor.element for factor in leg))


def _scales(factor: Factor) -> str:
    if not factor.is_blocked:
        return f"per {factor.per}"
    rows = factor.size if factor.per == "tile" else 1
    return f"per {rows}x{factor.size}"


def lowered_with_state(
    func: Callable[..., Any], policy: Policy, plan: Plan, params: Sequence[int]
) -> Callable[..., Any]:
    """A function as autocast rewrites it, with state in which nothing has been seen."""
    state = _blank(plan)
    return rewritten(func, plan.settings, params=params, keep=policy.keep, state=state)


def _blank(plan: Plan) -> Mapping[str, Slot]:
    recipe: Recipe | None = plan.settings.recipe
    has_scales = recipe is not None and bool(recipe.history)
    is_random = recipe is not None and recipe.is_random
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return {
        found.name: Slot(
            jnp.ones((*found.turns, 3), jnp.float32) if has_scales else None,
            jnp.zeros((*found.turns, *words.shape), words.dtype) if is_random else None,
            jnp.zeros((*found.turns, 3, 3), jnp.float32),
        )
        for found in named_sites(plan)
    }
