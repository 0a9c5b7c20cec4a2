"""Independent arithmetic: rounding by integers, without JAX, NumPy's casts or ml_dtypes."""

import numpy as np


def round_bits(bits: np.ndarray, *, mantissa: int, min_exponent: int, max_exponent: int):
    """Round float32 bit patterns to a narrower format, to nearest, ties to even.

    Args:
        bits: Patterns as uint32.
        mantissa: Stored significand bits of the format.
        min_exponent: Exponent of its smallest normal number.
        max_exponent: Exponent of its largest numbers.

    Returns:
        The rounded values as float32 bit patterns (NaN as one canonical pattern).
    """
    bits = bits.astype(np.uint64)
    sign, magnitude = bits & 0x8000_0000, bits & 0x7FFF_FFFF
    exponent = (magnitude >> 23).astype(np.int64)
    # Subnormal float32 have exponent field 0 and no implicit one; their unit is that of field 1.
    field = np.maximum(exponent, 1)
    significand = np.where(exponent > 0, (magnitude & 0x7F_FFFF) | 0x80_0000, magnitude & 0x7F_FFFF)
    # The value is significand * 2**(field - 150). The format's unit in the last place there:
    unit = np.maximum(field - 127, min_exponent) - mantissa
    shift = np.clip(unit - (field - 150), 0, 40)
    half = np.where(shift > 0, np.uint64(1) << np.maximum(shift - 1, 0).astype(np.uint64), 0)
    shift = shift.astype(np.uint64)
    quotient = significand >> shift
    rest = significand - (quotient << shift)
    up = (rest > half) | ((rest == half) & (shift > 0) & ((quotient & 1) == 1))
    quotient = (quotient + up.astype(np.uint64)) << shift
    value = np.ldexp(quotient.astype(np.float64), (field - 150).astype(np.int32))
    too_large = value >= np.ldexp(1.0, max_exponent + 1)
    value = np.where(too_large | (magnitude == 0x7F80_0000), np.inf, value)
    out = value.astype(np.float32).view(np.uint32).astype(np.uint64) | sign
    return np.where(magnitude > 0x7F80_0000, 0x7FC0_0000, out).astype(np.uint32)


def round_binade(field: int, *, mantissa: int, min_exponent: int, max_exponent: int):
    """`round_bits` of all 2**23 positive float32 with one exponent field, by scalar shifts.

    Args:
        field: The exponent field, 0 (subnormals) to 254.
        mantissa: As in `round_bits`.
        min_exponent: As in `round_bits`.
        max_exponent: As in `round_bits`.
    """
    significand = np.arange(2**23, dtype=np.uint32) | np.uint32(0x80_0000 if field else 0)
    power = max(field, 1) - 150
    shift = max(max(power + 23, min_exponent) - mantissa - power, 0)
    if shift > 24:  # Half a unit is more than any significand.
        return np.zeros(2**23, np.uint32)
    if shift:
        below_half, odd = np.uint32(2 ** (shift - 1) - 1), (significand >> shift) & 1
        significand = (significand + below_half + odd) >> shift << shift
    value = np.ldexp(significand.astype(np.float64), power)
    value[value >= np.ldexp(1.0, max_exponent + 1)] = np.inf
    return value.astype(np.float32).view(np.uint32)


FORMATS = {
    "bf16": {"mantissa": 7, "min_exponent": -126, "max_exponent": 127},
    "f16": {"mantissa": 10, "min_exponent": -14, "max_exponent": 15},
}


def canonical(x: np.ndarray) -> np.ndarray:
    """Float32 values as bit patterns, all NaN alike."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return np.where(np.isnan(x), np.uint32(0x7FC0_0000), bits)
