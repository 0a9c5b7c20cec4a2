"""Unmodified models of every framework in 8 and 4 bits: the gradient's direction stays."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

import halfstep
from halfstep import RECIPES
from tests._rows import slow_unless
from tests.models.transformers import CASES, Case, data

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Cosines to the gradient in float32.
LEAST = {
    **dict.fromkeys(("f8", "f8-delayed"), 0.994),
    **dict.fromkeys(("f8-e4m3", "f8-row", "f8-row-gw", "f8-block", "mxfp8"), 0.9955),
    # Of 4 bits nobody promises more; it is a bar against decay.
    "nvfp4": 0.9,
}


# One recipe in three frameworks, and one with blocks; all others are for before a release.
FAST = (("equinox", "f8"),)


@functools.cache
def case(framework: str) -> tuple[Case, np.ndarray]:
    made = CASES[framework]()
    return made, flat(jax.jit(jax.grad(made.loss))(made.params, data()))


def flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def cosine(first: np.ndarray, second: np.ndarray) -> float:
    return float(first @ second / np.sqrt((first @ first) * (second @ second)))


def gradient(made: Case, name: str) -> Any:
    recipe = RECIPES[name]
    scaling = None
    if recipe.needs_state:
        key = {"key": jax.random.key(3)} if recipe.is_random else {}
        scaling = recipe.init(made.loss, made.params, data(), **key)
    step = jax.jit(
        lambda s, p, x: halfstep.filter_grad(made.loss, s, policy=name, check_finite=True)(p, x)
    )
    return step(scaling, made.params, data())


def test_every_recipe_has_a_bar():
    assert set(LEAST) == set(RECIPES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "name"),
    slow_unless(itertools.product(CASES, RECIPES), lambda *row: row in FAST),
)
def test_the_gradient_keeps_its_direction(framework: str, name: str):
    made, exact = case(framework)
    _, finite, grads = gradient(made, name)
    assert finite
    assert LEAST[name] <= cosine(flat(grads), exact) < 1


@pytest.mark.rows(2)
@pytest.mark.parametrize("framework", CASES)
def test_all_dense_layers_are_found(framework: str):
    made, _ = case(framework)
    scaling = RECIPES["f8"].init(made.loss, made.params, data())
    # Four of attention, two of the perceptron, in three layers; and the head.
    turns = [site.degraded.shape for site in scaling.sites.values()]
    assert turns == [(3,)] * 6 + [()]
