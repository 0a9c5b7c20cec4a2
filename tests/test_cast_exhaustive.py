"""Casts against an integer oracle: every 16-bit pattern, and float32 by the million."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tqdm import tqdm

import halfstep
from tests._oracle import FORMATS, canonical, round_binade, round_bits

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16}
formats = pytest.mark.parametrize("name", DTYPES)


def flushed(bits: np.ndarray) -> np.ndarray:
    """Subnormal float32 as signed zeros, which is how XLA:CPU reads them."""
    subnormal = (bits & 0x7F80_0000) == 0
    return np.where(subnormal, bits & 0x8000_0000, bits)


def check_on_device(name: str, bits: np.ndarray) -> None:
    cast = jax.jit(lambda x: halfstep.cast_tree(x, name).astype(jnp.float32))
    got = canonical(np.asarray(cast(bits.view(np.float32))))
    expected = round_bits(bits, **FORMATS[name])
    # bfloat16 has float32's subnormals; XLA:CPU may flush what goes in or what comes out of them.
    if name == "bf16":
        got, expected = flushed(got), flushed(expected)
    wrong = np.flatnonzero(got != expected)
    assert wrong.size == 0, [hex(bits[i]) for i in wrong[:5]]


def check_on_host(name: str, bits: np.ndarray) -> None:
    got = canonical(halfstep.cast_tree(bits.view(np.float32), name).astype(np.float32))
    wrong = np.flatnonzero(got != round_bits(bits, **FORMATS[name]))
    assert wrong.size == 0, [hex(bits[i]) for i in wrong[:5]]


@formats
def test_every_16_bit_pattern_survives_float32(name: str):
    """To float32 and back is the identity on all 65,536 patterns; NaN stay NaN."""
    patterns = np.arange(2**16, dtype=np.uint16)
    narrow = patterns.view(np.dtype(DTYPES[name]))
    for values in (narrow, jnp.asarray(narrow)):
        wide = halfstep.cast_to_float32(values)
        assert wide.dtype == np.float32
        back = np.asarray(halfstep.cast_tree(wide, name))
        nan = np.isnan(np.asarray(wide))
        assert np.array_equal(back.view(np.uint16)[~nan], patterns[~nan])
        assert np.isnan(back[nan].astype(np.float32)).all()
        # And the values in between are what the bits say, computed without any cast.
        fields = FORMATS[name]
        exponent = (patterns & 0x7FFF) >> fields["mantissa"]
        mantissa = (patterns & ((1 << fields["mantissa"]) - 1)).astype(np.float64)
        implicit = np.where(exponent > 0, 2.0 ** fields["mantissa"], 0.0)
        power = np.maximum(exponent.astype(np.int32), 1) - 1 + fields["min_exponent"]
        value = np.ldexp(mantissa + implicit, power - fields["mantissa"])
        value = np.where(patterns >= 2**15, -value, value)
        finite = exponent < exponent.max()
        assert np.array_equal(np.asarray(wide)[finite].astype(np.float64), value[finite])


@formats
def test_every_16_bit_pattern_of_the_other_format(name: str):
    """bf16 to f16 and back again, each of the 65,536."""
    other = {"bf16": "f16", "f16": "bf16"}[name]
    narrow = np.arange(2**16, dtype=np.uint16).view(np.dtype(DTYPES[other]))
    bits = narrow.astype(np.float32).view(np.uint32)
    expected = round_bits(bits, **FORMATS[name])
    got = canonical(np.asarray(halfstep.cast_tree(jnp.asarray(narrow), name)).astype(np.float32))
    assert np.array_equal(flushed(got), flushed(expected))


@pytest.mark.rows(1)
@formats
@pytest.mark.parametrize("check", [check_on_device, check_on_host])
def test_float32_sample(name: str, check):
    """2**24 of the 2**32 patterns, spread evenly with a random offset, ties and edges included."""
    offset = int(np.random.default_rng().integers(2**8))
    print("offset", offset)
    check(name, (np.arange(2**24, dtype=np.uint64) * 2**8 + offset).astype(np.uint32))
    # All ties and their neighbors: the low half at, just below and just above one half.
    high = np.arange(2**16, dtype=np.uint64) << np.uint64(16)
    for low in (0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001):
        check(name, (high | np.uint64(low)).astype(np.uint32))


@pytest.mark.slow
@formats
def test_every_float32(name: str):
    """All 2**32 patterns, one exponent and sign at a time."""
    cast = jax.jit(lambda x: halfstep.cast_tree(x, name).astype(jnp.float32))
    for field in tqdm(range(256)):
        block = np.arange(2**23, dtype=np.uint32) | np.uint32(field << 23)
        expected = round_binade(field, **FORMATS[name]) if field < 255 else None
        for sign in (np.uint32(0), np.uint32(0x8000_0000)):
            got = np.asarray(cast((block | sign).view(np.float32)))
            if expected is None:  # One infinity, and NaN.
                assert got[0] == (-np.inf if sign else np.inf)
                assert np.isnan(got[1:]).all()
                continue
            bits, want = got.view(np.uint32), expected | sign
            if name == "bf16":
                bits, want = flushed(bits), flushed(want)
            assert np.array_equal(bits, want), (field, sign)


@formats
@pytest.mark.parametrize("field", [0, 1, 102, 103, 112, 113, 127, 142, 143, 200, 254])
def test_the_two_oracles_agree(name: str, field: int):
    block = np.arange(2**23, dtype=np.uint32)[:: 2**5 - 1] | np.uint32(field << 23)
    binade = round_binade(field, **FORMATS[name])[:: 2**5 - 1]
    assert np.array_equal(round_bits(block, **FORMATS[name]), binade)


def test_the_oracle_itself():
    """The oracle on numbers anybody can check by hand."""
    f16 = lambda x: round_bits(  # noqa: E731
        np.asarray([x], np.float32).view(np.uint32), **FORMATS["f16"]
    ).view(np.float32)[0]
    assert f16(65504.0) == 65504
    assert f16(65519.996) == 65504
    assert f16(65520.0) == np.inf
    assert f16(2.0**-24) == 2.0**-24
    assert f16(2.0**-25) == 0
    assert f16(2.0**-25 * 1.001) == 2.0**-24
    assert f16(2049.0) == 2048
    assert f16(2051.0) == 2052
    assert np.signbit(f16(-1e-20))
    assert np.isnan(f16(np.nan))
