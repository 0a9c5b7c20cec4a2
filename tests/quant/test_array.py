"""Arrays in low precision: any scale, any shape, any axis, packed, random, sharded."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import halfstep
from halfstep import quant
from halfstep.quant import Groups, groups_for

every = pytest.mark.parametrize("code", list(quant.CODES))
packed = pytest.mark.parametrize("code", ["int4", "root4"])

# The largest error of a code, as a part of its scale; of codes of roots that of the root. The
# derivations are with the tests of the codes. A scale is above the maximum by 2**-7 at most.
WIDEST = {
    "int8": 1 / 127.5,
    "int4": 1 / 7.5,
    "f8": 1 / 28,
    "root8": 1 / 255,
    "root4": 1 / 15,
    "rootf8": 1 / 28,
}
SLACK = 16 * halfstep.FORMATS["f32"].eps


@functools.partial(jax.jit, static_argnames=("code", "groups", "scale_dtype"))
def there_and_back(
    value: jax.Array,
    code: str,
    groups: Groups | None = None,
    scale_dtype: Any = jnp.bfloat16,
    key: jax.Array | None = None,
) -> jax.Array:
    stored = quant.quantize(value, code, groups=groups, scale_dtype=scale_dtype, key=key)
    return quant.dequantize(stored, code, groups=groups, shape=value.shape)


def check_errors(value: np.ndarray, code: str, groups: Groups | None = None, **options) -> None:
    """Compare an array with what is given back, by the maximum of each group."""
    got = np.asarray(there_and_back(jnp.asarray(value), code, groups, **options))
    assert got.shape == value.shape
    assert np.isfinite(got).all()
    used = groups or groups_for(value.shape) or Groups(-1, max(2, value.shape[-1]))
    wide, near = (x.astype(np.float64) for x in (value, got))
    if quant.CODES[code].is_root:
        wide, near = np.sqrt(wide), np.sqrt(near)
    starts = np.arange(0, value.shape[used.axis], used.size)
    if wide.size:
        largest = np.maximum.reduceat(np.abs(wide), starts, axis=used.axis)
        largest = np.repeat(largest, used.size, used.axis)[tuple(map(slice, value.shape))]
        assert (np.abs(near - wide) <= largest * ((1 + 2.0**-7) * WIDEST[code] + SLACK)).all()


def sample(code: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    value = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return value**2 if quant.CODES[code].is_root else value


@every
@pytest.mark.parametrize("power", [-20, -7, 0, 7, 20])
def test_any_magnitude(code: str, power: int):
    sigma = np.float32(10.0**power)
    check_errors(sample(code, (64, 48)) * sigma, code)
    check_errors(np.full((64, 48), 7e5, np.float32) * sigma, code, scale_dtype=jnp.float32)


@every
def test_zeros_stay_zeros(code: str):
    value = np.zeros((64, 48), np.float32)
    for key in (None, jax.random.key(0)):
        assert (there_and_back(jnp.asarray(value), code, key=key) == 0).all()
    # A group of zeros beside one that is none.
    value[:32] = 1
    got = np.asarray(there_and_back(jnp.asarray(value), code))
    assert (got[32:] == 0).all()
    assert (got[:32] > 0).all()


@every
def test_beside_an_outlier(code: str):
    """However large one element is, the others of its group have an error that is bounded."""
    for factor in (500.0, 1e6, 1e12):
        value = np.ones((32, 8), np.float32)
        value[5] = factor
        check_errors(value, code)
        if quant.CODES[code].is_root:
            got = np.asarray(there_and_back(jnp.asarray(value), code))
            # Never less than itself where it has no code of its own.
            smallest = (np.sqrt(factor) / quant.CODES[code].limit) ** 2
            assert (got >= min(1, smallest) * 0.9).all()


@every
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_group(code: str, bad: float):
    value = sample(code, (64, 8))
    value[3, 2] = bad
    got = np.asarray(there_and_back(jnp.asarray(value), code))
    assert not np.isfinite(got[3, 2])
    is_near = np.zeros(value.shape, bool)
    is_near[:32, 2] = True
    assert np.isfinite(got[~is_near]).all()
    assert np.isnan(got[is_near]).any()


@pytest.mark.parametrize("code", ["int8", "root4", "f8"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((100,), None),
        ((7,), None),
        ((1,), None),
        ((0, 64), None),
        ((64, 0), None),
        ((40, 5), None),
        ((2, 33, 6), Groups(-1, 4)),
        ((2, 33, 6), Groups(-2, 8)),
        ((10, 3, 6), Groups(-3, 4)),
        ((5, 4), Groups(-2, 2)),
    ],
)
def test_any_shape_and_axis(code: str, shape: tuple[int, ...], groups: Groups | None):
    check_errors(sample(code, shape), code, groups)


@packed
@pytest.mark.parametrize("size", [2, 6, 32])
def test_two_codes_share_a_byte(code: str, size: int):
    """All pairs of codes, in both halves of a byte, along every axis."""
    row = quant.CODES[code]
    codes = np.arange(-7 if code == "int4" else 1, row.limit + 1)
    first, second = (x.ravel() for x in np.meshgrid(codes, codes))
    # Groups whose largest code is the last one, so that the scale is known.
    values = [np.full(first.size, row.limit)] * (size - 2) + [first, second]
    place = np.stack(values if size > 2 else [first, second])
    top = np.abs(place).max(axis=0) == row.limit
    place = place[:, top].astype(np.float32)
    value = place / (2 * row.limit - np.abs(place)) if code == "int4" else (place / row.limit) ** 2
    for axis in (-1, -2, -3):
        moved = np.moveaxis(value[None], 1, 3 + axis)
        groups = Groups(axis, size)
        stored = jax.jit(functools.partial(quant.quantize, code=code, groups=groups))(moved)
        assert stored.codes.size == moved.size // 2
        back = functools.partial(quant.dequantize, code=code, groups=groups)
        # Full groups tell the shape.
        assert np.allclose(jax.jit(back)(stored), moved, rtol=SLACK, atol=0)


@packed
@pytest.mark.parametrize("shape", [(40, 5), (33,), (7,), (2,)])
def test_the_shape_of_full_groups_is_known(code: str, shape: tuple[int, ...]):
    value = jnp.asarray(sample(code, shape))
    stored = jax.jit(functools.partial(quant.quantize, code=code))(value)
    known = there_and_back(value, code)
    guessed = jax.jit(functools.partial(quant.dequantize, code=code))(stored)
    # Without the shape the last group comes whole.
    assert (guessed[tuple(map(slice, shape))] == known).all()


@pytest.mark.parametrize("code", ["int8", "root8", "int4", "root4"])
def test_random_rounding_has_the_right_mean(code: str, getkey: Callable[[], jax.Array]):
    draws = 4096
    value = jnp.asarray(sample(code, (32, 4)) + np.float32(0.2 * quant.CODES[code].is_root))

    @jax.jit
    @jax.vmap
    def once(key: jax.Array) -> jax.Array:
        stored = quant.quantize(value, code, key=key)
        return quant.dequantize(stored, code, shape=value.shape)

    got = np.asarray(once(jax.random.split(getkey(), draws))).astype(np.float64)
    gap = (got.max(axis=0) - got.min(axis=0)).max()
    # Half the widest step is the largest deviation of one; 6 deviations of the mean.
    error = np.abs(got.mean(axis=0) - np.asarray(value))
    assert (error <= gap * 0.5 * 6 / np.sqrt(draws) + SLACK * np.abs(value).max()).all()


def test_errors_say_what_is_needed():
    quantize, dequantize = inspect.unwrap(quant.quantize), inspect.unwrap(quant.dequantize)
    value = jnp.ones((64, 6))
    with pytest.raises(TypeError, match=r"quantize needs float32; got bfloat16\[2\]"):
        quantize(jnp.ones(2, jnp.bfloat16))
    with pytest.raises(ValueError, match=r"a scalar has no groups.*got shape=\(\)"):
        quantize(jnp.ones(()))
    with pytest.raises(ValueError, match="scale_dtype must be bfloat16 or float32; got float16"):
        quantize(value, scale_dtype=jnp.float16)
    with pytest.raises(ValueError, match="a code must be one of"):
        quantize(value, "int16")
    with pytest.raises(ValueError, match="must be even, since two codes share a byte; got size=3"):
        quantize(value, "int4", groups=Groups(-1, 3))
    with pytest.raises(ValueError, match="must be 1 or more; got size=0"):
        quantize(value, groups=Groups(-1, 0))
    for axis in (0, 1, -3):
        with pytest.raises(ValueError, match=f"from -1 to -2 .*got axis={axis}"):
            quantize(value, groups=Groups(axis))
    stored = quantize(value)
    with pytest.raises(ValueError, match=r"'root8'.*uint8\[64, 6\].*got int8\[64, 6\].*Pass the"):
        dequantize(stored, "root8")
    with pytest.raises(
        ValueError, match=r"scales of shape \[64, 1\]; got .*\[2, 6\]\. Pass the code, the"
    ):
        dequantize(stored, groups=Groups(-1))


def test_a_code_may_be_given_itself():
    value = jnp.asarray(sample("int8", (64, 6)))
    finer = dataclasses.replace(quant.CODES["int8"], name="int7", limit=63)
    stored = quant.quantize(value, finer)
    assert jnp.max(jnp.abs(stored.codes)) == 63
    assert jnp.allclose(quant.dequantize(stored, finer), value, atol=4 / 63)
