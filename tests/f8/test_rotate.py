"""Rotations: what they keep, and the ways to compute them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from halfstep._autocast.f8 import rotate


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1), st.sampled_from([64, 72, 8]))
def test_rotation_keeps_products(seed: int, length: int):
    keys = jax.random.split(jax.random.key(seed), 3)
    left, right = (jax.random.normal(key, (1, 8, length)) for key in keys[:2])
    turned = [rotate.rotated(value, 16, key=keys[2]) for value in (left, right)]
    products = [jnp.einsum("brn,bsn->brs", *pair) for pair in ((left, right), turned)]
    # A sum of `length` products, each rotated once: float32's steps at their size.
    bound = float(length * np.finfo(np.float32).eps * float(jnp.max(jnp.abs(left))) * 16)
    np.testing.assert_allclose(products[0], products[1], rtol=0, atol=bound)
    back = rotate.rotated(turned[0], 16, key=keys[2], back=True)
    np.testing.assert_allclose(back, left, rtol=0, atol=bound)
    if length >= 16:
        assert (turned[0] != left).any()


def test_rotation_spreads_outliers():
    value = jnp.zeros((1, 1, 16)).at[0, 0, 5].set(16.0)
    turned = rotate.rotated(value, 16, key=jax.random.key(0))
    np.testing.assert_array_equal(jnp.abs(turned), jnp.full((1, 1, 16), 4.0))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_both_rotations_are_the_same(dtype: str, back: bool):
    """A CPU adds pairs, and other hardware adds all 16 products at once."""
    value = jax.random.normal(jax.random.key(0), (2, 3, 16, 5)).astype(dtype)
    signs = jax.random.rademacher(jax.random.key(1), (16,), dtype)
    ways = [way(value, signs, back=back) for way in (rotate.by_sums, rotate.by_pairs)]
    assert [made.dtype for made in ways] == [jnp.float32] * 2
    size = float(jnp.max(jnp.sum(jnp.abs(value.astype(jnp.float32)), axis=2))) / 4
    np.testing.assert_allclose(*ways, rtol=0, atol=16 * np.finfo(np.float32).eps * size)
    columns = np.asarray(value, np.float64)
    rows = np.array([[(-1) ** (i & j).bit_count() for i in range(16)] for j in range(16)]) / 4
    by = np.asarray(signs, np.float64)
    rows = rows * (by[:, None] if back else by)
    exact = np.einsum("ij,bkjr->bkir", rows, columns)
    np.testing.assert_allclose(ways[0], exact, rtol=0, atol=16 * np.finfo(np.float32).eps * size)


@pytest.mark.rows(2)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (1, 0)])
def test_rotations_can_be_mapped(axes: tuple[int | None, int | None]):
    value = jax.random.normal(jax.random.key(0), (3, 3, 4, 32))
    keys = jax.random.split(jax.random.key(1), 3)

    def turn(value: jax.Array, key: jax.Array) -> jax.Array:
        return rotate.rotated(value, 16, key=key)

    given = value if axes[0] is not None else value[0], keys if axes[1] == 0 else keys[0]
    made = jax.vmap(turn, in_axes=axes)(*given)
    for index in range(3):
        one = given[0] if axes[0] is None else jnp.take(given[0], index, axis=axes[0])
        by = given[1] if axes[1] is None else given[1][index]
        np.testing.assert_array_equal(made[index], turn(one, by))
