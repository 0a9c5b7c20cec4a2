"""Rounding at random: to neighbors only, right on average, and never of what needs none."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import bitcast_convert_type

from halfstep import quant
from halfstep.quant._stochastic import _to_float

NAMES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
formats = pytest.mark.parametrize("name", NAMES)


def patterns(name: str) -> np.ndarray:
    """All values of a format, as the format has them."""
    dtype = jnp.dtype(name)
    word = np.dtype(f"uint{8 * dtype.itemsize}")
    return np.arange(2 ** (8 * dtype.itemsize)).astype(word).view(dtype)


def finite(name: str) -> np.ndarray:
    """All finite values of a format, in order, in float32."""
    values = patterns(name).astype(np.float32)
    return np.unique(values[np.isfinite(values)])


@functools.partial(jax.jit, static_argnames="name")
def _rounded(words: jax.Array, key: jax.Array, name: str) -> jax.Array:
    return quant.stochastic_round(bitcast_convert_type(words, jnp.float32), name, key=key)


def rounded(value: np.ndarray, name: str, seed: int = 0) -> np.ndarray:
    # By their bits: XLA:CPU takes denormal float32 numbers for zero.
    words = jnp.asarray(np.ascontiguousarray(value, np.float32).view(np.uint32))
    return np.asarray(_rounded(words, jax.random.key(seed), name))


@formats
def test_what_a_format_holds_is_never_changed(name: str):
    values = patterns(name)
    wide = values.astype(np.float32)
    is_number = ~np.isnan(wide)
    for seed in range(8):
        got = rounded(wide, name, seed)
        word = np.dtype(f"uint{8 * values.dtype.itemsize}")
        assert (got.view(word) == values.view(word))[is_number].all()
        assert np.isnan(got.astype(np.float32)[~is_number]).all()


def between(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values that lie between neighbors, with the neighbors: from all over the format."""
    values = finite(name)
    low, high = values[:-1], values[1:]
    parts = np.array([1 / 16, 0.3, 0.5, 0.75])
    wide = low.astype(np.float64)
    inner = wide[:, None] + (high.astype(np.float64) - wide)[:, None] * parts
    return inner.astype(np.float32), low[:, None], high[:, None]


@formats
def test_only_neighbors(name: str):
    value, low, high = between(name)
    for seed in range(8):
        got = rounded(value, name, seed).astype(np.float32)
        assert ((got == low) | (got == high)).all()
        assert (got == low).any()
        assert (got == high).any()
        # The sign of what is rounded to zero is kept.
        assert (np.signbit(got) == np.signbit(value))[value != 0].all()


@formats
def test_the_mean_is_right(name: str):
    """The mean over all pairs of neighbors and some draws, in steps."""
    value, low, high = between(name)
    draws = 2 ** (8 if value.size < 2**14 else 2)
    gap = high.astype(np.float64) - low
    total = np.zeros(value.shape)
    for seed in range(draws):
        total += (rounded(value, name, seed).astype(np.float64) - value) / gap
    # A rounding between two neighbors deviates by half a step at most; 6 deviations of the mean.
    count = draws * low.size
    assert (np.abs(total.sum(axis=0)) / count < 6 * 0.5 / np.sqrt(count)).all()
    # And of each pair, where there are draws enough to tell.
    assert (np.abs(total) / draws < 6 * 0.5 / np.sqrt(draws)).all()


def test_bfloat16_is_exact_for_every_remainder():
    """Each of the 2**16 remainders is rounded up by as many words of noise as it has."""
    # What noise a key gives is JAX's matter; that all of it counts alike is told by the sum.
    value = np.full(2**16, np.float32(1)).view(np.uint32) + np.arange(2**16, dtype=np.uint32)
    got = np.stack([rounded(value.view(np.float32), "bfloat16", s) for s in range(64)])
    up = got.astype(np.float32) > 1
    chance = np.arange(2**16) / 2**16
    deviation = np.sqrt(64 * (chance * (1 - chance)).sum())
    assert abs(up.sum() - 64 * chance.sum()) < 6 * deviation
    # Sums of the low and of the high quarter: a bias that cancels over all would be seen.
    for part in (slice(0, 2**14), slice(3 * 2**14, None)):
        deviation = np.sqrt(64 * (chance * (1 - chance))[part].sum())
        assert abs(up[:, part].sum() - 64 * chance[part].sum()) < 6 * deviation


def test_denormal_bfloat16():
    """XLA:CPU takes them for zero in arithmetic; integers do not."""
    words = np.arange(1, 2**23, 2**9, dtype=np.uint32)
    got = rounded(words.view(np.float32), "bfloat16").view(np.uint16)
    assert ((got == words >> 16) | (got == (words >> 16) + 1)).all()
    assert (got[words & 0xFFFF == 0] == (words >> 16)[words & 0xFFFF == 0]).all()
    up = (got.astype(np.int64) << 16).sum() - words.astype(np.int64).sum()
    assert abs(up) < 6 * 0.5 * 2**16 * np.sqrt(words.size)


@pytest.mark.parametrize("name", NAMES[1:])
def test_chances_are_those_of_exact_arithmetic(name: str):
    """The noise at which it turns is the value's place between its neighbors, to the last bits."""
    value, low, high = np.broadcast_arrays(*between(name))
    wide = [x.astype(np.float64) for x in (value, low, high)]
    nearest = value.astype(jnp.dtype(name)).astype(np.float64)
    other = np.where(nearest == wide[1], wide[2], wide[1])
    # Differences of float32 numbers that are near each other are exact, and so is this in float64.
    chance = np.abs(wide[0] - nearest) / (wide[2] - wide[1])
    run = jax.jit(functools.partial(_to_float, dtype=jnp.dtype(name)))
    for factor, wanted in ((1 - 2.0**-20, other), (1 + 2.0**-20, nearest)):
        noise = jnp.asarray((chance * factor).astype(np.float32))
        got = np.asarray(run(jnp.asarray(value), noise=noise)).astype(np.float64)
        assert (got == wanted).all()


@formats
def test_beyond_the_largest_and_what_is_not_finite(name: str):
    largest = finite(name)[-1]
    beyond = largest * np.array([1.001, 1.2, 2])
    beyond = beyond[beyond < np.finfo(np.float32).max]
    value = np.array([*beyond, 3.4e38, np.inf, np.nan], np.float32)
    value = np.concatenate([value, -value])
    with np.errstate(over="ignore"):
        wanted = value.astype(jnp.dtype(name)).astype(np.float32)
    for seed in range(8):
        got = rounded(value, name, seed).astype(np.float32)
        assert np.array_equal(got, wanted, equal_nan=True)


def test_a_key_is_a_result():
    value = np.linspace(-3, 3, 4096).astype(np.float32)
    first, again, other = (rounded(value, "float16", seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_errors_say_what_is_needed():
    key = jax.random.key(0)
    for dtype in (jnp.float32, jnp.int8, jnp.float8_e8m0fnu):
        name = jnp.dtype(dtype).name
        with pytest.raises(TypeError, match=f"needs a dtype of bfloat16, float16, .*got {name}"):
            quant.stochastic_round(jnp.ones(2), dtype, key=key)
    with pytest.raises(TypeError, match=r"stochastic_round needs float32; got bfloat16\[2\]"):
        inspect.unwrap(quant.stochastic_round)(jnp.ones(2, jnp.bfloat16), "float16", key=key)
