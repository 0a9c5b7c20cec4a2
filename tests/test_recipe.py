"""Recipes: what they are made of, and what cannot be one."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import RECIPES, Factor, Policy, Recipe
from halfstep._policy.recipe import state_of

pytestmark = [pytest.mark.core, pytest.mark.types]


@pytest.mark.parametrize("name", RECIPES)
def test_named_in_a_policy(name: str):
    policy = Policy.parse(name)
    assert policy.recipe == RECIPES[name]
    assert policy.recipe is not None
    assert policy.recipe.name == name
    assert Policy.parse(str(policy)) == policy
    assert policy.compute == np.dtype(jnp.bfloat16)
    assert hash(policy) == hash(Policy.parse(name))
    assert eval(repr(policy), {"Policy": Policy}) == policy


def test_the_issue_of_names():
    wanted = ("f8", "f8-delayed", "f8-row", "f8-row-gw", "f8-block", "mxfp8", "nvfp4")
    assert set(wanted) <= set(RECIPES)
    assert [name for name, recipe in RECIPES.items() if recipe.experimental] == ["nvfp4"]
    assert [name for name, recipe in RECIPES.items() if recipe.needs_state] == [
        "f8-delayed",
        "nvfp4",
    ]


def test_another_compute_dtype():
    policy = Policy.parse("p=f32,c=f16,o=f32,recipe=f8-row")
    assert (policy.compute, policy.recipe) == (np.dtype(np.float16), RECIPES["f8-row"])
    with pytest.raises(ValueError, match=r"for a compute dtype of 16 bits.*got compute='f32'"):
        Policy(compute="f32", recipe="f8")
    with pytest.raises(ValueError, match="got recipe with mode='inputs'"):
        Policy.parse("f8:inputs")


def test_one_of_the_users_own():
    mine = dataclasses.replace(RECIPES["f8"], name="mine", activations=True)
    policy = Policy(recipe=mine)
    assert "recipe=mine" in str(policy)
    assert repr(policy) == f"Policy({str(policy)!r})"
    assert jax.tree.leaves(mine) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Policy(recipe="f8-rows"), r"Did you mean 'f8-row'"),
        (lambda: Factor(element="e4m3", per="block"), r"takes a size; got size=0"),
        (lambda: Factor(element="e4m3", size=32), r"takes no size; got size=32"),
        (lambda: Factor(element="e4m3", per="block", size=48), r"`size` is a power of two; got 48"),
        (lambda: Factor(element="e2m1"), r"4 bits need a scale for each block"),
        (lambda: Factor(element="e4m3", rotate=True), r"about blocks"),
        (
            lambda: Factor(element="e4m3", per="block", size=32, four_or_six=True),
            r"`four_or_six` is about elements of 4 bits.*got element='e4m3' and two_level=False",
        ),
        (lambda: dataclasses.replace(RECIPES["f8-row"], history=4), r"for scales per tensor"),
        (lambda: dataclasses.replace(RECIPES["f8"], margin=-1), r"must be 0 or more; got 0 and -1"),
        (lambda: _legs(32, 16), r"blocks of one size along what is summed; got 32 and 16"),
        (lambda: _legs(16, 16, rotate=True), r"both factors of a leg are rotated"),
    ],
)
def test_what_cannot_be(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def _legs(first: int, second: int, *, rotate: bool = False) -> Recipe:
    left = Factor(element="e4m3", per="block", size=first, rotate=rotate)
    leg = (left, Factor(element="e4m3", per="block", size=second))
    return Recipe(name="x", forward=leg, input_gradient=None, weight_gradient=None)


@pytest.mark.parametrize("name", ["f8-delayed", "nvfp4"])
def test_state_is_asked_for(name: str):
    with pytest.raises(ValueError, match=rf"'{name}' has state.*RECIPES\['{name}'\].init"):
        halfstep.autocast(jnp.sum, name)
    with pytest.raises(ValueError, match=rf"'{name}' has state"):
        halfstep.filter_grad(jnp.sum, policy=name)


def test_the_state_of_another_recipe():
    x = jnp.ones((32, 32))
    scaling = RECIPES["f8-delayed"].init(lambda w: jnp.sum(x @ w), x)
    with pytest.raises(ValueError, match="state of the recipe 'f8-delayed', and the policy's is"):
        halfstep.filter_grad(jnp.sum, scaling, policy="f8")
    with pytest.raises(ValueError, match="rounds at random: pass key="):
        RECIPES["nvfp4"].init(jnp.sum, x)


def test_the_state_makes_itself_of_a_recipe():
    x = jnp.ones((32, 32))
    made = halfstep.F8Scaling.init(RECIPES["f8-delayed"], lambda w: jnp.sum(x @ w), x)
    same = RECIPES["f8-delayed"].init(lambda w: jnp.sum(x @ w), x)
    assert eqx.tree_equal(made, same)
    with pytest.raises(TypeError, match=r"a recipe is required; got 'f8'\. Take one of"):
        state_of("f8", lambda w: jnp.sum(x @ w), x)
