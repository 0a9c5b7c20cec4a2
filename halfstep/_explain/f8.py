"""How many contractions are in 8 or 4 bits, and why the others are not."""

import dataclasses
from collections.abc import Sequence

from halfstep._autocast import TWO_ACTIVATIONS, TWO_PARAMETERS
from halfstep._explain.entry import ExplainEntry
from halfstep._explain.reasons import KEPT
from halfstep._policy import Recipe

_FLOATS = frozenset({"bf16", "f16", "f32", "f64", "e4m3", "e5m2", "e2m1"})


@dataclasses.dataclass(frozen=True)
class ExplainOthers:
    """Contractions that are not in few bits for the same reason.

    Attributes:
        reason: Why.
        fix: What to type; empty if it is as the user wants it.
        eligible: Whether the recipe is for such contractions.
        count: How many of them run in one call.
        flops: What they compute.
        sources: Their lines: `train.py:12`.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        w = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        f8 = halfstep.explain(lambda w, x: x @ w @ (x @ w).T, "f8")(w, w).totals.f8
        assert [other.eligible for other in f8.others] == [False]  # No weight.
        ```
    """

    reason: str
    fix: str
    eligible: bool
    count: int
    flops: int
    sources: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExplainF8:
    """How many contractions of a forward pass are in few bits, and why the others are not.

    Attributes:
        format: `"fp8"`, or `"fp4"` for a recipe of 4 bits.
        recipe: The recipe's name.
        count: How many contractions are multiplied in it.
        total: How many there are.
        flops: Their share of the FLOPs of all contractions; 1 if there are none.
        eligible: Their share of the FLOPs of those that the recipe is for: all but products of two
            activations, unless the recipe's `activations` allows them; products of two parameters;
            and what a rule of the policy, `keep` or `keep_precision` has decided.
        others: Those that are not in it, by reason: first those that the recipe is for.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp

        w = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        f8 = halfstep.explain(lambda w, x: x @ w, "f8")(w, w).totals.f8
        assert (f8.count, f8.total, f8.format) == (1, 1, "fp8")
        ```
    """

    format: str
    recipe: str
    count: int
    total: int
    flops: float
    eligible: float
    others: tuple[ExplainOthers, ...]


def summarized(entries: Sequence[ExplainEntry], recipe: Recipe) -> ExplainF8:
    """How many contractions are in few bits."""
    contractions = [entry for entry in entries if entry.is_contraction]
    inside = [entry for entry in contractions if entry.in_f8]
    groups: dict[tuple[str, str, bool], list[ExplainEntry]] = {}
    for entry in contractions:
        if not entry.in_f8:
            key = (why_not(entry), fix(entry, recipe), is_eligible(entry))
            groups.setdefault(key, []).append(entry)
    others = [
        ExplainOthers(
            *key,
            sum(entry.count for entry in group),
            _flops(group),
            tuple(dict.fromkeys(entry.source.short for entry in group)),
        )
        for key, group in groups.items()
    ]
    done = _flops(inside)
    return ExplainF8(
        format="fp4" if {factor.element for factor in recipe.forward} == {"e2m1"} else "fp8",
        recipe=recipe.name,
        count=sum(entry.count for entry in inside),
        total=sum(entry.count for entry in contractions),
        flops=_share(done, _flops(contractions)),
        eligible=_share(done, _flops([entry for entry in contractions if is_eligible(entry)])),
        others=tuple(sorted(others, key=lambda other: (not other.eligible, -other.flops))),
    )


def is_eligible(entry: ExplainEntry) -> bool:
    """Whether a recipe is for a contraction, and nothing that the user says is against it."""
    if entry.in_f8:
        return True
    floats = {value.dtype for value in entry.ins[:2]} <= _FLOATS
    return floats and not entry.by and why_not(entry) not in (TWO_ACTIVATIONS, TWO_PARAMETERS, KEPT)


def why_not(entry: ExplainEntry) -> str:
    """Why a contraction is not multiplied in few bits."""
    return entry.reason if entry.by else entry.refusal or entry.reason


def fix(entry: ExplainEntry, recipe: Recipe) -> str:
    """What to type about a contraction that is not in few bits; empty if it is as it should be."""
    why = why_not(entry)
    if entry.by or why in (TWO_PARAMETERS, KEPT):
        return ""
    if why == TWO_ACTIVATIONS:
        return f'`dataclasses.replace(halfstep.RECIPES["{recipe.name}"], activations=True)`.'
    if "multiplied in" in why:
        return (
            "scales of whole tensors (recipe 'f8'), or of rows in matrix products ('f8-row'), are "
            "multiplied in few bits."
        )
    if "precision=" in why:
        return "leave `precision=` out."
    if "written in" in why:
        return "write both operands in float32."
    scope = entry.scope or "head"
    name = "" if entry.scope else f'put it into `jax.named_scope("{scope}")` and '
    aside = f'{name}leave it in 16 bits: `rules=("op:{entry.name}@{scope}=compute",)`.'
    padded = f"pad it to a multiple of {recipe.multiple_of}; or "
    return f"{padded}{aside}" if "no multiple of" in why else aside


def _flops(entries: Sequence[ExplainEntry]) -> int:
    return sum(entry.flops * entry.count for entry in entries)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
