"""A float32 value is a bfloat16 and what it lacks, for every pattern of bits."""

import functools
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


@functools.partial(jax.jit, static_argnames="bits")
def _parts(words: jax.Array, bits: Literal[8, 16]) -> tuple[jax.Array, ...]:
    high, low = quant.split(bitcast_convert_type(words, jnp.float32), bits=bits)
    assert low.dtype == (jnp.int8 if bits == 8 else jnp.int16)
    joined = bitcast_convert_type(quant.join(high, low), jnp.uint32)
    return bitcast_convert_type(high, jnp.uint16), joined


@functools.partial(jax.jit, static_argnames="bits")
def _claims(words: jax.Array, bits: Literal[8, 16]) -> dict[str, jax.Array]:
    """All that `split` and `join` claim, told by integers, and compiled to one pass."""
    high, joined = _parts(words, bits)
    size, near, wide = words & SIZE, joined & SIZE, high.astype(jnp.uint32) << 16
    is_nan = size > INFINITE
    found = {
        "a NaN stays one": (near > INFINITE) == is_nan,
        "the sign is kept": (joined & SIGN == words & SIGN) & (wide & SIGN == words & SIGN),
        "the bfloat16 is the nearest": is_nan | _is_nearest(near, wide & SIZE, 0x8000),
    }
    if bits == 16:
        found["every bit is kept"] = (joined == words) | (size > LAST_NAN)
    else:
        found["24 bits"] = is_nan | (joined & 0xFF == 0)
        found["24 bits are the nearest"] = is_nan | _is_nearest(size, near, 0x80)
    return {claim: held.all() for claim, held in found.items()}


def _is_nearest(size: jax.Array, rounded: jax.Array, half: int) -> jax.Array:
    """Magnitudes as integers: at most half a step apart, and if it is half a step, larger."""
    distance = bitcast_convert_type(rounded - size, jnp.int32)
    return (distance <= half) & (distance > -half)


def check(words: np.ndarray, bits: Literal[8, 16]) -> None:
    assert [claim for claim, held in _claims(words, bits).items() if not held] == []


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
    near = np.asarray(_parts(words, 8)[1]).view(np.float32).astype(np.float64)
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
    with pytest.raises(
        TypeError, match=r"`noise` of split must be random words, uint32; got float32"
    ):
        unchecked(quant.split)(jnp.ones(2), bits=8, noise=jnp.ones(2))
    with pytest.raises(ValueError, match="bits must be 8 or 16; got 24"):
        unchecked(quant.split)(jnp.ones(2), bits=24)
    with pytest.raises(TypeError, match=r"`high` of join needs bfloat16; got float32\[2\]"):
        unchecked(quant.join)(jnp.ones(2), jnp.ones(2, jnp.int8))
    with pytest.raises(TypeError, match="`low` of join needs int8 or int16; got int32"):
        unchecked(quant.join)(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.int32))


def test_no_finite_value_becomes_a_nan_whatever_is_joined():
    words = np.arange(1 << 16, dtype=np.uint16)
    high = jnp.asarray(words.view(jnp.bfloat16))
    high = high[jnp.isfinite(high)]
    for low in range(-128, 128, 5):
        joined = quant.join(high, jnp.full(high.shape, low, jnp.int8))
        assert bool(jnp.isfinite(joined).all())
        # Within a unit of the parameter, in the direction that its sign says.
        assert bool((jnp.signbit(joined) == jnp.signbit(high)).all())
