"""Explain why an operation runs in the dtype that it runs in."""

from types import MappingProxyType

import jax

from halfstep._autocast import (
    CONTRACTIONS,
    GROUPS,
    PICKS,
    TABLE,
    Decision,
    Kind,
    RecipeProduct,
    Rule,
)
from halfstep._explain.entries import name_of
from halfstep._explain.places import PlanPlace
from halfstep._policy import KEEP_SCOPE, Factor, Leg
from halfstep._program import Constant, Finder, Node, Operand

# Operations that are in float32 only for certain operands.
_SPECIAL = MappingProxyType(
    {"mul": "a square", "sub": "one value, such as a maximum, off many"},
)
_WHY = MappingProxyType({name: why for _, why, names in GROUPS for name in names})
KEPT = "an operand is kept in float32 by the user"
# Operations that make another view of a value.
_VIEWS = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "expand_dims", "gather"}
    | {"mesh_cast", "name", "reshape", "reshard", "rev", "sharding_constraint", "slice", "squeeze"}
    | {"split", "transpose"}
)


def reason(place: PlanPlace, index: int, finder: Finder) -> str:
    """Return why an operation runs as it does, in a few words."""
    node, decision = place.plan.graph.nodes[index], place.plan.decisions[index]
    # The user's choice comes first, then what is special about the operation, and only then what
    # the table says about its primitive.
    by = decision.by or place.by
    if by:
        return "keep_precision" if KEEP_SCOPE in by else f"rule {by}"
    if node.name in CONTRACTIONS and decision.rule is not Rule.COMPUTE:
        return not_lowered(place, index)
    if decision.site is not None:
        said = _written_as(decision.site, name_of(place.plan.settings.compute))
        return f"{said}, rule {decision.recipe_by}" if decision.recipe_by else said
    if decision.refusal and decision.recipe is not None:
        return f"not {decision.recipe.name}: {decision.refusal}"
    if not decision.known:
        return "not in the table of operations: runs as written"
    if decision.rule in (Rule.WIDEST, Rule.FOLLOW):
        return _followed(place, index, decision, finder)
    if decision.rule is Rule.FLOAT32 and TABLE.get(node.name) is not Rule.FLOAT32:
        return _SPECIAL.get(node.name, "a function applied to elements")
    return _WHY[node.name]


def not_lowered(place: PlanPlace, index: int) -> str:
    """Return why a contraction does not run in the compute dtype."""
    node = place.plan.graph.nodes[index]
    precision = node.params.get("precision")
    dtypes = {place.plan.graph.aval(operand).dtype for operand in node.ins[:2]}
    names = " and ".join(sorted(map(name_of, dtypes)))
    if place.plan.decisions[index].rule is Rule.FOLLOW:
        return PICKS
    if names != "f32":
        return f"its operands are written in {names}"
    if Kind.KEPT in [place.kind(index, operand) for operand in node.ins[:2]]:
        return KEPT
    return f"precision={_precision(precision)} is asked for"


def _precision(precision: object) -> str:
    parts = precision if isinstance(precision, tuple) else (precision,)
    names = [getattr(part, "name", str(part)) for part in parts]
    return names[0] if len(set(names)) == 1 else f"({', '.join(names)})"


def _followed(place: PlanPlace, index: int, decision: Decision, finder: Finder) -> str:
    node = place.plan.graph.nodes[index]
    kinds = [place.kind(index, operand) for operand in node.ins]
    # One float32 operand is enough to make the operation wide: the first one is named.
    for operand, kind in zip(node.ins, kinds, strict=True):
        if kind in (Kind.WIDE, Kind.KEPT):
            return f"as {described(place, operand, finder)}"
    if Kind.LOW in kinds:
        return f"its operands are {name_of(decision.dtype)}"
    if any(kind.yields for kind in kinds):
        return "of parameters and constants only"
    return "its operands are not float32: runs as written"


def described(place: PlanPlace, operand: Operand, finder: Finder) -> str:
    """Describe a value in a few words: what makes it, or which argument it is."""
    if isinstance(operand, Constant):
        return f"the constant {float(operand.value):g}"
    made_by = place.producer(operand)
    if made_by is not None:
        node: Node = place.plan.graph.nodes[made_by]
        return f"`{node.name}` of {finder.find(node.source.traceback).short}"
    position = place.input_position(operand)
    if position is None:
        return "an array that the function closes over"
    if place.outer is None:
        return f"argument `{place.paths[position]}`"
    given = place.given[position]
    return "what the loop carries" if given is None else described(place.outer, given, finder)


def parameter(place: PlanPlace, index: int) -> str:
    """Return the parameter that a contraction multiplies; empty if none is known."""
    for operand in place.plan.graph.nodes[index].ins[:2]:
        if place.kind(index, operand).is_weight:
            found = _argument(place, operand)
            if found:
                return found
    return ""


def _argument(place: PlanPlace, operand: Operand | None) -> str:
    """Return the argument that a value is a view of; empty if none is known."""
    if operand is None or isinstance(operand, Constant):
        return ""
    made_by = place.producer(operand)
    if made_by is not None:
        node = place.plan.graph.nodes[made_by]
        return _argument(place, node.ins[0]) if node.name in _VIEWS and node.ins else ""
    position = place.input_position(operand)
    if position is None:
        return ""
    if place.outer is None:
        return place.paths[position]
    return _argument(place.outer, place.given[position])


# Contractions in 8 or 4 bits.


def multiplies(site: RecipeProduct) -> bool:
    """Return whether the elements themselves are multiplied, and not their values in 16 bits."""
    factors = site.recipe.forward
    # Scales of rows can be applied to the result of a matrix product. Scales of blocks change
    # within a sum, and the windows of a convolution share no rows, so the operands are scaled back
    # before the product.
    if site.contraction is jax.lax.dot_general_p:
        return not any(factor.is_blocked for factor in factors)
    return all(factor.per == "tensor" for factor in factors)


def _written_as(site: RecipeProduct, compute: str) -> str:
    """Describe how a product is encoded on its legs: `f8: e4m3, gradients e5m2, per tensor`."""
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
        but = f" except on {' and '.join(site.units)}" if site.units else ""
        parts.append(f"multiplied in {compute}{but}")
    parts.append(" x ".join(dict.fromkeys(_scales(factor) for factor in recipe.forward)))
    return f"{recipe.name}: {', '.join(parts)}"


def _elements(leg: Leg) -> str:
    return " x ".join(dict.fromkeys(factor.element for factor in leg))


def _scales(factor: Factor) -> str:
    if not factor.is_blocked:
        return f"per {factor.per}"
    rows = factor.size if factor.per == "tile" else 1
    return f"per {rows}x{factor.size}"
