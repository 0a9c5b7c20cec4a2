"""A float32 value is a bfloat16 and what it lacks, for every pattern of bits."""

import inspect
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import bitcast_convert_type

from halfstep import quant
from halfstep.quant._split import widened

SIGN, SIZE, INFINITE = np.uint32(0x8000_0000), np.uint32(0x7FFF_FFFF), np.uint32(0x7F80_0000)
LAST_NAN = np.uint32(0x7FFF_7FFF)
"""The last one that is kept as it is."""

both = pytest.mark.parametrize("bits", [8, 16])


@jax.jit
def _parts16(words: jax.Array) -> tuple[jax.Array, ...]:
    high, low = quant.split(bitcast_convert_type(words, jnp.float32))
    joined = bitcast_convert_type(quant.join(high, low), jnp.uint32)
    return bitcast_convert_type(high, jnp.uint16), low, joined


@jax.jit
def _parts8(words: jax.Array) -> tuple[jax.Array, ...]:
    high, low = quant.split(bitcast_convert_type(words, jnp.float32), bits=8)
    joined = bitcast_convert_type(quant.join(high, low), jnp.uint32)
    return bitcast_convert_type(high, jnp.uint16), low, joined


def check(words: np.ndarray, bits: Literal[8, 16]) -> None:
    """All that `split` and `join` claim, told by integers."""
    high, low, joined = map(np.asarray, (_parts8 if bits == 8 else _parts16)(words))
    assert low.dtype == (np.int8 if bits == 8 else np.int16)
    is_nan = (words & SIZE) > INFINITE
    # A NaN stays one, of its sign.
    assert (((joined & SIZE) > INFINITE) == is_nan).all()
    assert (joined & SIGN == words & SIGN).all()
    if bits == 16:
        kept = (words & SIZE) <= LAST_NAN
        assert (joined[kept] == words[kept]).all()
    else:
        assert (joined[~is_nan] & 0xFF == 0).all()
        check_nearest((words & SIZE)[~is_nan], (joined & SIZE)[~is_nan], 0x80)
    # The bfloat16 is the nearest to what is joined.
    wide = high.astype(np.uint32) << 16
    assert (wide & SIGN == words & SIGN).all()
    check_nearest((joined & SIZE)[~is_nan], (wide & SIZE)[~is_nan], 0x8000)


def check_nearest(size: np.ndarray, rounded: np.ndarray, half: int) -> None:
    """Magnitudes as integers: at most half a step apart, and if it is half a step, larger."""
    distance = rounded.astype(np.int64) - size
    assert (distance <= half).all()
    assert (distance > -half).all()


def boundaries() -> np.ndarray:
    """Around every bfloat16, every tie between two, and every tie of 24 bits near them."""
    high = np.arange(2**16, dtype=np.uint32)[:, None] << 16
    near = [0, 1, 0x7F, 0x80, 0x81, 0xFF, 0x100, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0x8001]
    near += [0x807F, 0x8080, 0xFF7F, 0xFF80, 0xFFFF]
    return (high + np.array(near, np.uint32)).ravel()


@both
def test_every_bfloat16_and_the_ties_between(bits: Literal[8, 16]):
    check(boundaries(), bits)


@both
def test_a_sample_of_all_patterns(bits: Literal[8, 16]):
    # An odd step visits the 256th part of all patterns, spread evenly over them.
    words = np.arange(2**24, dtype=np.uint32) * np.uint32(255) + np.uint32(bits)
    check(words, bits)


@both
def test_denormal_values(bits: Literal[8, 16]):
    check(np.arange(2**23, dtype=np.uint32), bits)
    check(np.arange(2**20, dtype=np.uint32) * np.uint32(7) | SIGN, bits)


@pytest.mark.slow
@both
def test_every_pattern(bits: Literal[8, 16]):
    chunk = np.arange(2**24, dtype=np.uint32)
    for start in range(2**8):
        check(chunk + np.uint32(start << 24), bits)


@both
def test_every_bfloat16_lacks_nothing(bits: Literal[8, 16]):
    patterns = np.arange(2**16, dtype=np.uint16)
    value = widened(bitcast_convert_type(jnp.asarray(patterns), jnp.bfloat16))
    high, low = quant.split(value, bits=bits)
    got = np.asarray(bitcast_convert_type(high, jnp.uint16))
    is_nan = (patterns & 0x7FFF) > 0x7F80
    assert (got[~is_nan] == patterns[~is_nan]).all()
    assert (np.asarray(low) == 0).all()
    assert ((got[is_nan] & 0x7FFF) > 0x7F80).all()
    assert (got[is_nan] == patterns[is_nan]).all() or bits == 8


def test_24_bits_are_within_their_epsilon():
    """`2**-16` of every normal value: 16 bits of fraction, half a step."""
    words = boundaries()
    size = words & SIZE
    is_normal = (size >= 0x0080_0000) & (size < 0x7F7F_FF80)
    words = words[is_normal]
    value = words.view(np.float32).astype(np.float64)
    near = np.asarray(_parts8(words)[2]).view(np.float32).astype(np.float64)
    error = np.abs(near - value) / np.abs(value)
    # The worst is half a step above a power of two.
    assert error.max() == 2.0**-16 / (1 + 2.0**-16)


def test_the_largest_values():
    """Where the documentation says that something becomes infinite, and not before."""
    largest = jnp.float32(np.finfo(np.float32).max)
    for sign in (1, -1):
        below = np.nextafter(np.float32(2.0**128 - 2.0**111), np.float32(0))
        for parts in (quant.split(jnp.float32(sign * below), bits=8), quant.split(sign * largest)):
            assert np.isfinite(quant.join(*parts))
            assert np.isinf(np.asarray(parts[0]).astype(np.float32))
        near = quant.join(*quant.split(jnp.float32(sign * (2.0**128 - 2.0**111)), bits=8))
        assert near == sign * np.inf
        for edge, is_infinite in ((2.0**128 - 2.0**119, True), (2.0**128 - 1.5 * 2.0**119, False)):
            high, _ = quant.split(jnp.float32(sign * edge))
            assert np.isinf(np.asarray(high).astype(np.float32)) == is_infinite
        for bits in (8, 16):
            assert quant.join(*quant.split(jnp.float32(sign * np.inf), bits=bits)) == sign * np.inf


def test_a_random_split_has_the_right_mean():
    """Over all 256 words of noise, every one of 256 remainders is right to the last bit."""
    noise = np.arange(2**8, dtype=np.uint32)[None, :] + np.uint32(0xABCD_EF00)
    starts = np.array([0x3F80_0000, 0x3FAA_AA00, 0xC0FF_FF00, 0x0000_0100, 0x7F7F_FE00], np.uint32)
    words = (starts[:, None] + np.arange(2**8, dtype=np.uint32)).ravel()[:, None]
    words = np.broadcast_to(words, (words.size, 2**8))
    value = bitcast_convert_type(jnp.asarray(words), jnp.float32)
    noise = jnp.asarray(np.broadcast_to(noise, words.shape))
    joined = quant.join(*quant.split(value, bits=8, noise=noise))
    got = np.asarray(bitcast_convert_type(joined, jnp.uint32)).astype(np.int64)
    assert (got.mean(axis=1) == words[:, 0]).all()
    assert (np.abs(got - words) < 2**8).all()


def test_nothing_is_random_about_16_bits():
    value = jnp.asarray(np.array([1 / 3, -7e5, 1e-40], np.float32))
    noise = jnp.full(3, 0xFFFF_FFFF, jnp.uint32)
    for plain, noisy in zip(quant.split(value), quant.split(value, noise=noise), strict=True):
        assert (plain == noisy).all()


unchecked: Callable[[Callable], Callable] = inspect.unwrap
"""Without the types that tests check: a user's call is not checked by them."""


def test_errors_say_what_is_needed():
    with pytest.raises(TypeError, match=r"split needs float32; got bfloat16\[2\].*astype"):
        unchecked(quant.split)(jnp.ones(2, jnp.bfloat16))
    with pytest.raises(ValueError, match="bits must be 8 or 16; got 24"):
        unchecked(quant.split)(jnp.ones(2), bits=24)
    with pytest.raises(TypeError, match=r"join needs bfloat16; got float32\[2\]"):
        unchecked(quant.join)(jnp.ones(2), jnp.ones(2, jnp.int8))
    with pytest.raises(TypeError, match="join needs the rest in int8 or int16; got int32"):
        unchecked(quant.join)(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int32))
