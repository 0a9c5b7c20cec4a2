"""What the tests of checkpoints share: states, a data iterator, and equality to the bit."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import halfstep
from halfstep._base import is_key, without_key_type


class Places:
    """A data iterator: it knows where it is."""

    def __init__(self, place: Any):
        self.place = place

    def get_state(self) -> Any:
        return self.place

    def set_state(self, state: Any) -> None:
        self.place = state


def same_bits(a: Any, b: Any) -> bool:
    if is_key(a) != is_key(b):
        return False
    a, b = without_key_type(a), without_key_type(b)
    if isinstance(a, jax.Array | np.ndarray | np.generic):
        same = type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape
        return same and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return type(a) is type(b) and a == b


def assert_same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    assert [n for n, (a, b) in enumerate(pairs) if not same_bits(a, b)] == []


def recipes_state() -> Any:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ params["w"]))

    params, x = {"w": jnp.ones((16, 16))}, jnp.ones((4, 16))
    key = jax.random.key(0)
    return {
        name: recipe.init(loss, params, x, key=key if recipe.is_random else None)
        for name, recipe in halfstep.RECIPES.items()
        if recipe.needs_state
    }


def through(path: pathlib.Path, state: Any, like: Any, **options: Any) -> Any:
    """A state, saved and restored."""
    # Only where Orbax is installed: the tests that ask are skipped otherwise.
    from halfstep.integrations.orbax import Checkpoints

    with Checkpoints(path, **options) as checkpoints:
        checkpoints.save(1, state)
        checkpoints.wait()
        return checkpoints.restore(like)[1]
