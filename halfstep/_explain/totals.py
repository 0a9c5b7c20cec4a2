"""Add up the operations of a function: FLOPs, casts, stored bytes, products in 8 and 4 bits."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend import core

from halfstep._autocast import NO_RECIPE, TWO_ACTIVATIONS, TWO_PARAMETERS, Settings
from halfstep._explain.entries import ExplainEntry, is_float, name_of
from halfstep._explain.reasons import KEPT
from halfstep._explain.stored import Residual
from halfstep._explain.walk import Step
from halfstep._policy import Recipe
from halfstep._program import Opaque, structure_of

# Reasons that say that no recipe is for a contraction.
_NOT_FOR = (TWO_ACTIVATIONS, TWO_PARAMETERS, KEPT, NO_RECIPE)
_FLOATS = frozenset({"bf16", "f16", "f32", "f64", "e4m3", "e5m2", "e2m1"})


@dataclasses.dataclass(frozen=True)
class ExplainOthers:
    """Contractions that are not in 8 or 4 bits, all for the same reason.

    Attributes:
        reason: Why.
        fix: The code to type; empty if nothing has to change.
        eligible: Whether the recipe is for such contractions.
        count: How many of them run in one call.
        flops: Their FLOPs.
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
    """How many contractions of a forward pass are in 8 or 4 bits, and why the others are not.

    Attributes:
        format: `"fp8"`, `"fp4"` for a recipe of 4 bits, or `"fp4 and fp8"` where rules mix them.
        recipe: The name of the policy's recipe, or the names of all that its rules give.
        count: How many contractions are multiplied in this format.
        total: How many contractions there are.
        flops: Their share of the FLOPs of all contractions; 1 if there are none.
        eligible: Their share of the FLOPs of the contractions that the recipe is for. These are all
            but products of two activations, unless the recipe's `activations` allows them; products
            of two parameters; what a rule of the policy, `keep` or `keep_precision` has decided;
            and what no rule gives a recipe, if the policy has none.
        others: The contractions that are not in this format, by reason: first those that the recipe
            is for.

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


@dataclasses.dataclass(frozen=True)
class ExplainTotals:
    """Totals of one forward pass and of what it stores.

    Attributes:
        contraction_flops: FLOPs of contractions by the dtype of their operands.
        low: Share of them in the compute dtype or in fewer bits; 1 if there are no contractions.
        other_flops: FLOPs of all operations that are not contractions.
        again_flops: The part of `other_flops` that islands recompute in the backward pass.
        islands: How many islands there are.
        casts: Conversions between dtypes that are added to the function's own.
        stored: Bytes kept for the backward pass by dtype, arguments and casts of them left out.
            `None` if the function cannot be differentiated.
        stored_casts: Bytes of casts and views of arguments that are kept, by dtype. Compilers may
            recompute them instead.
        stored_float32: Bytes that the function as it is written would keep, by dtype, arguments and
            views of them left out.
        f8: How many contractions are in 8 or 4 bits, and why the others are not; `None` if the
            policy has no recipe.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        report = halfstep.explain(lambda w, x: jnp.sum(x @ w), "bf16")(jnp.eye(4), jnp.eye(4))
        assert report.totals.low == 1.0
        assert report.totals.contraction_flops == {"bf16": 2 * 4**3}
        ```
    """

    contraction_flops: Mapping[str, int]
    low: float
    other_flops: int
    again_flops: int
    islands: int
    casts: int
    stored: Mapping[str, int] | None
    stored_casts: Mapping[str, int] | None
    stored_float32: Mapping[str, int] | None
    f8: ExplainF8 | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        return dataclasses.asdict(self)


def totals_of(
    entries: Sequence[ExplainEntry],
    settings: Settings,
    added: int,
    stored: Sequence[Residual] | None,
    written: Sequence[Residual] | None,
) -> ExplainTotals:
    """Add up the operations of a function.

    Args:
        entries: The operations.
        settings: What the user has asked for.
        added: How many casts are added to the function's own.
        stored: The values kept for the backward pass; `None` without a derivative.
        written: The same for the function as it is written.
    """
    counted = _contraction_flops(entries)
    total = sum(counted.values())
    compute = name_of(settings.compute)
    low = sum(
        entry.flops * entry.count
        for entry in entries
        if entry.is_contraction and is_low(entry, compute)
    )
    # Functions that run as written count too, if they are written in the compute dtype.
    low += sum(entry.inside_flops.get(compute, 0) * entry.count for entry in entries)

    def kept(found: Sequence[Residual] | None, views: bool) -> dict[str, int] | None:
        if found is None:
            return None
        return by_dtype([residual for residual in found if residual.of_argument == views])

    return ExplainTotals(
        counted,
        low / total if total else 1.0,
        _other_flops(entries),
        _other_flops(entries, islands=True),
        len({entry.island for entry in entries} - {None}),
        added,
        kept(stored, False),
        kept(stored, True),
        kept(written, False),
        _f8_of(entries, settings.recipes) if settings.recipes else None,
    )


def _contraction_flops(entries: Sequence[ExplainEntry]) -> dict[str, int]:
    """Return the FLOPs of contractions by the dtype of their operands, the largest first."""
    total: collections.Counter[str] = collections.Counter()
    for entry in entries:
        if entry.is_contraction:
            total[entry.dtypes.partition(" -> ")[0]] += entry.flops * entry.count
        for name, count in entry.inside_flops.items():
            total[name] += count * entry.count
    return dict(total.most_common())


def is_low(entry: ExplainEntry, compute: str) -> bool:
    """Return whether a contraction is in the compute dtype, or in fewer bits."""
    return entry.in_f8 or {value.dtype for value in entry.ins[:2]} == {compute}


def _other_flops(entries: Sequence[ExplainEntry], *, islands: bool = False) -> int:
    """Return the FLOPs of all other operations, or of those in islands."""
    return sum(
        entry.flops * entry.count
        for entry in entries
        if not entry.is_contraction and (not islands or entry.island is not None)
    )


def by_dtype(found: Sequence[Residual]) -> dict[str, int]:
    """Return bytes by dtype, the largest first."""
    total: collections.Counter[str] = collections.Counter()
    for residual in found:
        total[residual.type.dtype] += residual.type.bytes
    return dict(total.most_common())


# Casts.


def casts(jaxpr: core.Jaxpr) -> int:
    """Count the conversions between floating-point dtypes in one forward pass.

    Loops count by their length, a `while` loop as one iteration. All branches of a `cond` count.
    """
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "convert_element_type":
            total += _is_cast(equation.invars[0].aval, equation.outvars[0].aval)
            continue
        found = structure_of(equation.primitive.name, equation.params)
        # No casts are added to a kernel, which runs as it is written.
        if found is not None and not isinstance(found, Opaque):
            total += sum(inner.times * casts(inner.function.jaxpr) for inner in found.inner())
    return total


def _is_cast(before: object, after: object) -> bool:
    """Return whether a conversion is one between floating-point dtypes."""
    dtypes = {getattr(before, "dtype", None), getattr(after, "dtype", None)}
    return len(dtypes) == 2 and all(map(is_float, dtypes))


def own_casts(steps: list[Step]) -> int:
    """Count the conversions between floating-point dtypes that the user has written."""
    total = 0
    for step in steps:
        if step.entry.name == "convert_element_type":
            graph = step.place.plan.graph
            if _is_cast(graph.aval(step.node.ins[0]), graph.avals[step.node.outs[0]]):
                total += step.entry.count
    return total


# Contractions in 8 or 4 bits.


def _f8_of(entries: Sequence[ExplainEntry], recipes: Sequence[Recipe]) -> ExplainF8:
    """Count the contractions in 8 or 4 bits, and group the others by reason."""
    contractions = [entry for entry in entries if entry.is_contraction]
    inside = [entry for entry in contractions if entry.in_f8]
    groups: dict[tuple[str, str, bool], list[ExplainEntry]] = {}
    for entry in contractions:
        if not entry.in_f8:
            key = (why_not_f8(entry), f8_fix(entry, recipes[0]), is_f8_eligible(entry))
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
        format=" and ".join(sorted({_format(recipe) for recipe in recipes})),
        recipe=" and ".join(recipe.name for recipe in recipes),
        count=sum(entry.count for entry in inside),
        total=sum(entry.count for entry in contractions),
        flops=_share(done, _flops(contractions)),
        eligible=_share(done, _flops([entry for entry in contractions if is_f8_eligible(entry)])),
        others=tuple(sorted(others, key=lambda other: (not other.eligible, -other.flops))),
    )


def _format(recipe: Recipe) -> str:
    return "fp4" if {factor.element for factor in recipe.forward} == {"e2m1"} else "fp8"


def is_f8_eligible(entry: ExplainEntry) -> bool:
    """Return whether a recipe is for a contraction, and nothing the user says is against it."""
    if entry.in_f8:
        return True
    # Recipes leave products of integers and of complex numbers alone.
    floats = {value.dtype for value in entry.ins[:2]} <= _FLOATS
    return floats and not entry.by and why_not_f8(entry) not in _NOT_FOR


def why_not_f8(entry: ExplainEntry) -> str:
    """Return why a contraction is not multiplied in 8 or 4 bits."""
    return entry.reason if entry.by else entry.refusal or entry.reason


def f8_fix(entry: ExplainEntry, recipe: Recipe) -> str:
    """Return what to type for a contraction not in 8 or 4 bits; empty if nothing is wrong."""
    why = why_not_f8(entry)
    if entry.by or why in (TWO_PARAMETERS, KEPT, NO_RECIPE):
        return ""
    if why == TWO_ACTIVATIONS:
        return f'`dataclasses.replace(halfstep.RECIPES["{recipe.name}"], activations=True)`.'
    # The words of the reason, which the report shows above the fix, decide. A contraction without a
    # case of its own here can still be left in 16 bits.
    if "multiplied in" in why:
        return (
            "scales of whole tensors (recipe 'f8'), or of rows in matrix products ('f8-row'), are "
            "multiplied in low precision on every GPU that can; `halfstep.preflight` says which "
            "products a target multiplies so."
        )
    if "precision=" in why:
        return "leave `precision=` out."
    if "written in" in why:
        return "write both operands in float32."
    scope = entry.scope or "head"
    name = "" if entry.scope else f'put it into `jax.named_scope("{scope}")` and '
    aside = f'{name}leave it in 16 bits: `rules=("op:{entry.name}@{scope}=compute",)`.'
    padded = f"pad it to a multiple of {recipe.multiple_of}; or "
    return f"{padded}{aside}" if "not a multiple of" in why else aside


def _flops(entries: Sequence[ExplainEntry]) -> int:
    return sum(entry.flops * entry.count for entry in entries)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
