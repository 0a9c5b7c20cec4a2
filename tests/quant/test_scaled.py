"""Factors in low precision: scales, saturation, blocks, rotation."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from halfstep import RECIPES, Factor, quant
from halfstep.quant import _scaled
from tests._rows import slow_unless

E4, E5 = Factor(element="e4m3"), Factor(element="e5m2")
MX = RECIPES["mxfp8"].forward[0]
FP4, FP4_TILE = RECIPES["nvfp4"].forward


def every_bfloat16() -> jax.Array:
    bits = jnp.arange(2**16, dtype=jnp.uint32).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def wide(value: Any) -> np.ndarray:
    """In float64; of signaling NaNs NumPy says something."""
    with np.errstate(invalid="ignore"):
        return np.asarray(value).astype(np.float64)


@pytest.mark.parametrize("limit", [448.0, 57344.0, 6.0])
def test_scales_are_the_largest_powers_of_two(limit: float):
    amax = jnp.abs(every_bfloat16()).astype(jnp.float32)
    scale = wide(jax.jit(_scaled.power_of_two, static_argnums=1)(amax, limit))
    size = wide(amax)
    finite = np.isfinite(size)
    assert np.isnan(scale[~finite]).all()
    scale, size = scale[finite], size[finite]
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (size * scale <= limit).all()
    # One more would be too much, but where float32 has no larger scale; denormal sizes are zero.
    inside = (size >= 2.0**-126) & (scale < 2.0**126)
    assert (size[inside] * scale[inside] * 2 > limit).all()
    assert (scale[size == 0] == 1).all()
    back = np.asarray(_scaled.inverse(jnp.asarray(scale, jnp.float32)), np.float64)
    assert (back * scale == 1).all()


@pytest.mark.parametrize("factor", [E4, E5], ids=lambda f: f.element)
def test_casts_saturate(factor: Factor):
    value = every_bfloat16()
    made = wide(jax.jit(_scaled.saturated, static_argnums=1)(value, factor))
    given = wide(value)
    finite = np.isfinite(given)
    assert np.isnan(made[~finite]).all()
    inside = finite & (np.abs(given) <= factor.max)
    expected = wide(value.astype(factor.dtype))
    np.testing.assert_array_equal(made[inside], expected[inside])
    beyond = finite & (np.abs(given) > factor.max)
    np.testing.assert_array_equal(made[beyond], np.sign(given[beyond]) * factor.max)


def test_four_bits_saturate():
    value = jnp.asarray([0.24, 0.26, 2.4, 2.6, 5.1, 7.0, 1e9, -1e9], jnp.float32)
    made = _scaled.saturated(value, FP4).astype(jnp.float32)
    np.testing.assert_array_equal(made, [0.0, 0.5, 2.0, 3.0, 6.0, 6.0, 6.0, -6.0])


@pytest.mark.rows(2)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_stochastic_rounding_is_unbiased(dtype: str):
    # 64 values, 2**15 draws each: more than two million.
    limit = float(jnp.finfo(dtype).max)
    value = jnp.linspace(-0.9, 0.9, 64, dtype=jnp.float32) * limit
    many = jnp.broadcast_to(value, (2**15, 64))
    drawn = quant.stochastic_round(many, dtype, key=jax.random.key(0)).astype(jnp.float32)
    drawn = np.asarray(drawn, np.float64)
    mean = drawn.mean(axis=0)
    # Both neighbors among all numbers of the format, and the chance of the upper one.
    every = wide(jnp.arange(2**17, dtype=jnp.float32).astype(dtype)) if limit > 448 else None
    every = wide(jnp.linspace(-limit, limit, 2**20 + 1).astype(dtype)) if every is None else every
    every = np.unique(np.concatenate([every, -every])[np.isfinite(np.concatenate([every, -every]))])
    size = wide(value)
    upper = every[np.searchsorted(every, size)]
    lower = every[np.searchsorted(every, size, side="right") - 1]
    step = np.where(upper > lower, upper - lower, 1)
    chance = (size - lower) / step
    deviation = step * np.sqrt(chance * (1 - chance) / 2**15)
    assert (np.abs(mean - size) <= 5 * deviation).all()
    assert (np.unique(drawn[:, 3]).size, np.unique(drawn[:, 40]).size) == (2, 2)
    again = quant.stochastic_round(many, dtype, key=jax.random.key(1)).astype(jnp.float32)
    assert (np.asarray(again) != drawn).any()


def test_stochastic_rounding_needs_a_key():
    factor = dataclasses.replace(FP4, rounding="stochastic")
    with pytest.raises(ValueError, match="stochastic rounding needs a key"):
        _scaled.saturated(jnp.ones((4,)), factor)


@pytest.mark.rows(6)
@pytest.mark.parametrize(
    ("name", "which", "length"),
    slow_unless(
        itertools.product(["mxfp8", "f8-block", "nvfp4"], [0, 1], [64, 96, 70]),
        lambda name, which, length: which == 0 or length == 70,
    ),
)
def test_blocks(name: str, which: int, length: int):
    factor = RECIPES[name].forward[which]
    value = jax.random.normal(jax.random.key(0), (2, 40, length))
    value = jnp.ldexp(value, jax.random.randint(jax.random.key(1), (2, 40, 1), -6, 6))
    written = jax.jit(_scaled.write_blocks, static_argnums=1)(value, factor)
    assert written.elements.dtype == factor.dtype
    back = _scaled.read_blocks(written, factor, length=length, dtype=jnp.float32)
    # In bfloat16 nothing is lost.
    low = _scaled.read_blocks(written, factor, length=length)
    np.testing.assert_array_equal(low.astype(jnp.float32), back)
    # Half a step of the elements, of the largest magnitude that shares the scale.
    blocks = -(-length // factor.size)
    padded = jnp.pad(jnp.abs(value), ((0, 0), (0, 0), (0, blocks * factor.size - length)))
    most = jnp.max(padded.reshape(2, 40, blocks, factor.size), axis=-1)
    if factor.per == "tile":
        rows = -(-40 // factor.size)
        filled = jnp.pad(most, ((0, 0), (0, rows * factor.size - 40), (0, 0)))
        most = jnp.max(filled.reshape(2, rows, factor.size, blocks), axis=2)
        most = jnp.repeat(most, factor.size, axis=1)[:, :40]
    bound = jnp.repeat(most, factor.size, axis=-1)[..., :length]
    eps = float(jnp.finfo(factor.dtype).eps)
    # Two levels: a scale that is rounded down saturates by its own rounding.
    slack = 2.0**-4 if factor.two_level else 0.0
    assert (jnp.abs(back - value) <= bound * (eps / 2 + slack)).all()


def lost(value: jax.Array, factor: Factor) -> np.ndarray:
    """The squared errors of each block or tile of 16 columns."""
    written = _scaled.write_blocks(value, factor)
    back = _scaled.read_blocks(written, factor, length=value.shape[-1], dtype=jnp.float32)
    squares = wide(back - value) ** 2
    rows = factor.size if factor.per == "tile" else 1
    return squares.reshape(-1, rows, value.shape[-1] // 16, 16).sum(axis=(1, 3))


@pytest.mark.parametrize("factor", [FP4, FP4_TILE], ids=["block", "tile"])
def test_four_or_six(factor: Factor):
    """Each block has the scale that loses less, and the choice is made block by block."""
    value = jax.random.uniform(jax.random.key(0), (1, 32, 256), minval=-1)
    # Where magnitudes are small beside the largest, 6 loses less; elsewhere, mostly 4.
    value = jnp.where(jnp.arange(256) // 16 % 2 == 0, value, value**5)
    # The outer scale is that of the largest magnitude, and is the same with both.
    value = value.at[0, 0, 0].set(8.0)
    chosen, six = lost(value, factor), lost(value, dataclasses.replace(factor, four_or_six=False))
    assert (chosen <= six * (1 + 1e-6)).all()
    # Either scale is taken often.
    assert 0.1 < np.mean(chosen < six) < 0.9


def test_four_holds_what_six_does_not():
    value = jnp.full((1, 1, 16), 0.75).at[0, 0, 0].set(1.0)
    written = _scaled.write_blocks(value, FP4)
    elements = np.asarray(written.elements[0, 0, 0].astype(jnp.float32))
    np.testing.assert_array_equal(elements, [4.0, *[3.0] * 15])
    np.testing.assert_array_equal(_scaled.read_blocks(written, FP4, length=16), value)
    plain = dataclasses.replace(FP4, four_or_six=False)
    made = _scaled.read_blocks(_scaled.write_blocks(value, plain), plain, length=16)
    assert (made[0, 0, 1:] != 0.75).all()


@pytest.mark.parametrize("four_or_six", [True, False])
def test_small_blocks_beside_an_outlier_are_not_zero(four_or_six: bool):
    factor = dataclasses.replace(FP4, four_or_six=four_or_six)
    value = jax.random.normal(jax.random.key(0), (1, 1, 256)) / 4
    value = value.at[0, 0, :16].set(2.0**17)
    written = _scaled.write_blocks(value, factor)
    back = _scaled.read_blocks(written, factor, length=256, dtype=jnp.float32)
    # Scales have three bits of mantissa.
    np.testing.assert_allclose(back[0, 0, :16], value[0, 0, :16], rtol=2.0**-4)
    scale = written.scale.astype(jnp.float32)
    assert (scale >= 2.0**-9).all()
    # Elements up to 2 are half a scale apart.
    step = jnp.repeat(scale * written.outer, 16, axis=-1)[0, 0, 16:] / 2
    small = jnp.abs(value[0, 0, 16:]) <= 4 * step
    assert jnp.mean(small) > 0.6
    assert (jnp.abs(back - value)[0, 0, 16:] <= step / 2)[small].all()


def test_what_is_not_finite_is_seen():
    for factor in (MX, FP4):
        value = jnp.ones((1, 2, 64)).at[0, 1, 3].set(jnp.inf)
        back = _scaled.read_blocks(_scaled.write_blocks(value, factor), factor, length=64)
        assert jnp.isnan(back[0, 1, 3])
    made = _scaled.write(jnp.ones((4, 4)).at[1, 1].set(jnp.nan), E4)
    assert jnp.isnan(made.scale).all()
    # With a scale of the past, too.
    made = _scaled.write(jnp.ones((4, 4)).at[1, 1].set(jnp.inf), E4, scale=jnp.float32(2))
    assert jnp.isnan(made.elements[1, 1].astype(jnp.float32))
    assert made.elements[0, 0] == 2


def test_zeros():
    for factor in (MX, FP4, FP4_TILE):
        written = _scaled.write_blocks(jnp.zeros((1, 16, 64)), factor)
        assert (_scaled.read_blocks(written, factor, length=64) == 0).all()
    assert (_scaled.write(jnp.zeros((4, 4)), E4).scale == 1).all()
