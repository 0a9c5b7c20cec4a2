"""Decide which contractions can be computed in 8 or 4 bits, and why the others are not."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.core import ShapedArray

from halfstep._autocast.f8.dimensions import of_dot
from halfstep._autocast.f8.experts import roles_of
from halfstep._autocast.f8.product import RecipeProduct
from halfstep._autocast.kinds import Kind
from halfstep._policy import Recipe
from halfstep._program import Graph, Node

TWO_ACTIVATIONS = "a product of two activations (the recipe's `activations` allows it)"
TWO_PARAMETERS = "a product of two parameters"
NO_RECIPE = "no rule gives it a recipe, and the policy has none"


def site_of(
    node: Node,
    graph: Graph,
    kinds: Sequence[Kind],
    recipe: Recipe,
    *,
    by: str,
    has_state: bool,
    compute: np.dtype,
    out: np.dtype,
    weight_gradient: np.dtype,
) -> RecipeProduct | str:
    """Return a contraction in 8 or 4 bits, or why the recipe does not apply to it.

    Args:
        node: The contraction.
        graph: The graph that it is part of.
        kinds: The kinds of its operands.
        recipe: How products are computed in 8 or 4 bits.
        by: The user's rule that matches it, if one does.
        has_state: Whether the recipe's state reaches it.
        compute: The compute dtype.
        out: The dtype of its result.
        weight_gradient: The dtype of the weight's gradient.
    """
    if by:
        return f"the rule {by!r}"
    if recipe.is_random and not has_state:
        return "its random key does not reach into a shard_map, a while loop or a custom derivative"
    weights = [place for place in (0, 1) if kinds[place].is_weight]
    if not weights and not recipe.activations:
        return TWO_ACTIVATIONS
    if len(weights) == 2:
        return TWO_PARAMETERS
    weight = weights[0] if weights else 1
    avals = [graph.aval(operand) for operand in node.ins[:2]]
    adapted = _adapted(node, recipe, avals)
    if isinstance(adapted, str):
        return adapted
    sizes = _sizes(node, avals, weight)
    if isinstance(sizes, str):
        return sizes
    # Products in 8 and 4 bits need dimensions that are multiples of a number (16 in cuBLASLt), and
    # rows consist of whole blocks.
    unfit = [size for size in sizes if size % recipe.multiple_of or not size]
    if unfit:
        return f"{unfit[0]} is not a multiple of {recipe.multiple_of}"
    gradients = [compute, compute]
    gradients[weight] = weight_gradient
    # Each leg asks for its own dtype.
    options = {**node.params, "preferred_element_type": None}
    return RecipeProduct(
        contraction=node.primitive,
        options=tuple(options.items()),
        recipe=adapted,
        weight=weight,
        compute=compute,
        out=out,
        gradients=(gradients[0], gradients[1]),
        shapes=(tuple(avals[0].shape), tuple(avals[1].shape)),
        out_shape=tuple(graph.avals[node.outs[0]].shape),
    )


def _adapted(node: Node, recipe: Recipe, avals: Sequence[ShapedArray]) -> Recipe | str:
    """Return the recipe for a kind of contraction, or why it does not apply."""
    if node.primitive is jax.lax.dot_general_p:
        return recipe
    if node.name == "conv_general_dilated":
        if any(factor.per != "tensor" for leg in recipe.legs for factor in leg):
            return "a convolution has one scale for each tensor"
        # Both factors of a convolution have the same dtype.
        first = recipe.forward[0]
        same = tuple(
            dataclasses.replace(factor, element=first.element) for factor in recipe.forward
        )
        legs = {
            name: None if getattr(recipe, name) is None else same
            for name in ("forward", "input_gradient", "weight_gradient")
        }
        return dataclasses.replace(recipe, **legs)
    if node.name == "ragged_dot_general" and [len(aval.shape) for aval in avals] == [2, 3]:
        return recipe
    return f"no recipe knows `{node.name}` of these shapes"


def _sizes(node: Node, avals: Sequence[ShapedArray], weight: int) -> tuple[int, ...] | str:
    """Return the sizes of the weight's summed and own dimensions, or a reason to refuse."""
    shape = avals[weight].shape
    if node.primitive is not jax.lax.dot_general_p and weight == 0:
        # The dimensions below are those of a kernel or of a stack of matrices, which is the second
        # factor of these contractions.
        return f"a parameter that is the first factor of `{node.name}`"
    if node.name == "conv_general_dilated":
        spec = node.params["dimension_numbers"]
        if node.params["feature_group_count"] != 1 or node.params["batch_group_count"] != 1:
            return "a convolution in groups"
        return shape[spec.rhs_spec[0]], shape[spec.rhs_spec[1]]
    if node.name == "ragged_dot_general":
        found = roles_of(node.name, node.params, [aval.shape for aval in avals])
        axes = (1, 2) if found is None else (*found[1].summed, *found[1].own)
        return shape[axes[0]], shape[axes[1]]
    roles = of_dot(node.params["dimension_numbers"], [len(aval.shape) for aval in avals])[weight]
    if not roles.own:
        return "a product with a vector"
    return tuple(int(np.prod([shape[axis] for axis in axes])) for axes in (roles.summed, roles.own))
