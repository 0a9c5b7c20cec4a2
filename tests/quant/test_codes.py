"""Every code, over all of its code points: what it gives back, and how far off it may be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import bitcast_convert_type

import halfstep
from halfstep import quant
from halfstep.quant._codes import Code, as_code, scale_of

every = pytest.mark.parametrize("name", list(quant.CODES))
linear = pytest.mark.parametrize("name", ["int8", "root8", "int4", "root4"])
SIGNED, ROOTS = ("int8", "int4", "f8"), ("root8", "root4", "rootf8")

# A handful of float32 operations, each of which is off by half an epsilon.
SLACK = 8 * halfstep.FORMATS["f32"].eps


def points(code: Code) -> np.ndarray:
    """All codes that `encode` may give, in the order of their values."""
    if code.name in ("f8", "rootf8"):
        patterns = np.arange(2**8, dtype=np.uint8).view(code.dtype)
        values = patterns.astype(np.float32)
        kept = np.isfinite(values) & ((values > 0) | (code.name == "f8"))
        # Zero has two patterns.
        return np.unique(values[kept]).astype(code.dtype)
    low = -code.limit if code.name in SIGNED else 1
    return np.arange(low, code.limit + 1).astype(code.stored)


def scales(code: Code) -> np.ndarray:
    """Every positive bfloat16 that a scale can be without a code point being denormal or infinite.

    Of roots: those of float32 numbers.
    """
    high = np.arange(0x0080, 0x7F80, dtype=np.uint32) << 16
    values = high.view(np.float32)
    if code.is_root:
        return values[(values >= 2.0**-63) & (values <= 2.0**64)]
    # The smallest code point is at least the 2**-18th part of its scale, and XLA may multiply by
    # the reciprocal of a scale.
    return values[(values >= 2.0**-108) & (values <= 2.0**126)]


@every
def test_code_points_are_given_back(name: str):
    """Decoded and encoded again, all code points at all scales are themselves, and in order."""
    code = quant.CODES[name]
    codes, scale = points(code), scales(code)

    @jax.jit
    def again(codes: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        codes, scale = jnp.broadcast_arrays(codes[None, :], scale[:, None])
        value = code.decode(codes, scale)
        return value, code.encode(value, scale)

    value, got = map(np.asarray, again(jnp.asarray(codes), jnp.asarray(scale)))
    assert np.isfinite(value).all()
    assert (np.diff(value, axis=1) > 0).all()
    # The largest code is the scale.
    assert np.abs(value[:, -1] / scale - 1).max() <= SLACK
    assert (got.astype(np.float32) == codes.astype(np.float32)).all()


def positions(code: Code, value: np.ndarray, scale: float) -> np.ndarray:
    """Where values lie between codes, in float64."""
    x = value.astype(np.float64) / scale
    if code.name in ("int8", "int4"):
        return code.limit * 2 * x / (1 + np.abs(x))
    return code.limit * x


@every
@pytest.mark.parametrize("scale", [1.0, 1.984375, 2.0**-60, 3.0 * 2.0**62])
def test_a_code_is_the_nearest(name: str, scale: float):
    code = quant.CODES[name]
    low = -1.0 if name in SIGNED else 0.0
    value = (np.linspace(low, 1.0, 100_001) * scale).astype(np.float32)
    at = jnp.full(value.shape, scale, jnp.float32)
    codes = code.encode(jnp.asarray(value), at)
    place, got = positions(code, value, scale), np.asarray(codes).astype(np.float64)
    assert (np.diff(got) >= 0).all()
    distance = np.abs(got - place)
    if name in ("f8", "rootf8"):
        # 3 bits of fraction, so that half a step is 2**-4 of a power of two; below 2**-6 denormal.
        half = np.maximum(np.abs(place) * 2.0**-4, 2.0**-10)
    else:
        half = 0.5
    slack = SLACK * np.abs(place)
    smallest = got.min() if code.is_root else -np.inf
    assert (distance <= half + slack)[place >= smallest].all()
    assert (got[place < smallest] == smallest).all()
    # In values, where the codes of a curve are farthest apart: the last ones.
    error = np.abs(np.asarray(code.decode(codes, at)).astype(np.float64) - value) / scale
    widest = {"int8": 1 / 127.5, "int4": 1 / 7.5, "f8": 1 / 28, "rootf8": 1 / 28}
    widest |= {"root8": 1 / 255, "root4": 1 / 15}
    assert error.max() <= widest[name] + SLACK


@pytest.mark.parametrize("name", ROOTS)
def test_roots_have_no_code_of_zero(name: str):
    code = quant.CODES[name]
    value = np.concatenate([[0], np.geomspace(1e-38, 1e19, 4096)]).astype(np.float32)
    scale = np.float32(1e19)
    codes = code.encode(jnp.asarray(value), jnp.full(value.shape, scale))
    assert (np.asarray(codes).astype(np.float32) > 0).all()
    assert (np.asarray(code.decode(codes, jnp.full(value.shape, scale))) > 0).all()


def test_scales_are_rounded_up():
    """For every upper half of a positive float32: not below, and the next bfloat16 at most."""
    high = np.arange(0x7F81, dtype=np.uint32)[:, None] << 16
    words = (high + np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], np.uint32)).ravel()
    words = words[words <= 0x7F80_0000]
    magnitude = bitcast_convert_type(jnp.asarray(words), jnp.float32)
    scale = scale_of(magnitude, jnp.bfloat16)
    got = np.asarray(bitcast_convert_type(scale, jnp.uint16)).astype(np.uint32) << 16
    # Positive floats are in the order of their bits.
    assert (got >= words).all()
    assert (got - words < 2**16).all()
    assert (scale_of(magnitude[::7], jnp.float32) == magnitude[::7]).all()


def test_scales_that_are_no_numbers():
    words = np.array([0x7F80_0001, 0x7FC0_0000, 0x7FFF_0000, 0x7FFF_0001, 0x7FFF_FFFF], np.uint32)
    scale = scale_of(bitcast_convert_type(jnp.asarray(words), jnp.float32), jnp.bfloat16)
    got = np.asarray(bitcast_convert_type(scale, jnp.uint16))
    assert ((got > 0x7F80) & (got < 0x8000)).all()


@linear
def test_random_codes_have_the_right_mean(name: str):
    """What is decoded, or its square, is right on average over evenly spaced noise."""
    code = quant.CODES[name]
    draws = 2048
    low = -code.limit if name in SIGNED else 1
    parts = np.array([0, 0.01, 0.25, 0.5, 0.9, 0.999])
    place = np.append((np.arange(low, code.limit)[:, None] + parts).ravel(), code.limit)
    x = place / (2 * code.limit - np.abs(place)) if name in SIGNED else place / code.limit
    scale = jnp.full((x.size, draws), 3.0)
    value = jnp.broadcast_to(jnp.asarray(3 * x, jnp.float32)[:, None], scale.shape)
    noise = jnp.asarray(np.arange(draws, dtype=np.float32) / draws)
    codes = code.encode(value, scale, noise=jnp.broadcast_to(noise, scale.shape))
    steps = np.asarray(codes).astype(np.float64)
    # Neighbors only, and no code beyond the last.
    assert np.abs(steps).max() <= code.limit
    assert (np.abs(steps - place[:, None]) < 1 + SLACK * code.limit).all()
    decoded = np.asarray(code.decode(codes, scale)).astype(np.float64)
    wanted = np.asarray(value[:, 0]).astype(np.float64)
    if code.is_root:
        decoded, wanted = decoded**2, wanted**2
    gap = decoded.max(axis=1) - decoded.min(axis=1)
    # Evenly spaced noise meets every probability within one draw.
    error = np.abs(decoded.mean(axis=1) - wanted)
    assert (error <= gap / draws + 9 * SLACK).all()


@pytest.mark.slow
def test_random_codes_do_not_drift():
    """A second moment of noise, kept for 3,000 steps of `b2 = .999`, is right on average."""
    steps, b2, shape = 3_000, 0.999, (32, 512)
    # The largest of a group is always the same, and the others are at about the 20th code.
    is_largest = (jnp.arange(32) == 0)[:, None] & jnp.ones(shape, bool)

    def step(number: jax.Array, carry: tuple[quant.Quantized, jax.Array]) -> Any:
        stored, exact = carry
        grads, draws = jax.random.split(jax.random.fold_in(jax.random.key(0), number))
        squares = (20 / 255 * jax.random.normal(grads, shape)) ** 2
        squares = jnp.where(is_largest, 1.0, squares)
        value = b2 * quant.dequantize(stored, "root8") + (1 - b2) * squares
        stored = quant.quantize(value, "root8", scale_dtype=jnp.float32, key=draws)
        return stored, b2 * exact + (1 - b2) * squares

    true = jnp.where(is_largest, 1.0, (20 / 255) ** 2)
    first = quant.quantize(true, "root8", scale_dtype=jnp.float32), true
    stored, exact = jax.jit(lambda first: jax.lax.fori_loop(0, steps, step, first))(first)
    off = np.asarray(quant.dequantize(stored, "root8") - exact)[1:]
    # Elements are independent: 5 deviations of their mean.
    assert abs(off.mean()) < 5 * off.std() / np.sqrt(off.size)


def test_unknown_codes():
    assert as_code("int8") is quant.CODES["int8"] is as_code(quant.CODES["int8"])
    with pytest.raises(ValueError, match=r"a code must be one of int8, root8, .*; got 'int9'"):
        as_code("int9")
