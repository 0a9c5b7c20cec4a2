"""Describe number formats by their bits, and encode numbers in them.

These are integers and fractions alone. `halfstep.FORMATS` describes the same formats by NumPy and
JAX, which take longer to import than the command takes to answer; a test compares both.
"""

import dataclasses
import math
from fractions import Fraction
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """One floating-point format: a sign, an exponent and a mantissa.

    Attributes:
        name: Short name, as policies and recipes write it.
        dtype: The name of the dtype.
        exponent_bits: Bits of the exponent.
        mantissa_bits: Stored bits of the significand, without the implicit leading one.
        beyond: What becomes of numbers beyond the largest. `"inf"`: as in IEEE 754, the highest
            exponent is for infinity and NaN. `"nan"`: only the highest pattern is NaN, and none
            is infinity. `"max"`: every pattern is a number.
        used_by: Whether a policy names the format, or only recipes use it.
        aliases: Other names of the format.
    """

    name: str
    dtype: str
    exponent_bits: int
    mantissa_bits: int
    beyond: Literal["inf", "nan", "max"]
    used_by: Literal["policy", "recipe"]
    aliases: tuple[str, ...] = ()

    @property
    def bits(self) -> int:
        """Bits of storage for one number."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def lowest(self) -> int:
        """The exponent of the smallest positive number."""
        return 1 - self._bias - self.mantissa_bits

    @property
    def max(self) -> float:
        """Largest finite number."""
        # The patterns above it, with a sign of zero.
        special = {"inf": 2**self.mantissa_bits, "nan": 1, "max": 0}[self.beyond]
        code = 2 ** (self.bits - 1) - 1 - special
        exponent, mantissa = divmod(code, 2**self.mantissa_bits)
        return math.ldexp(2**self.mantissa_bits + mantissa, exponent - 1 + self.lowest)

    @property
    def tiny(self) -> float:
        """Smallest positive normal number."""
        return math.ldexp(1.0, 1 - self._bias)

    @property
    def smallest(self) -> float:
        """Smallest positive number, subnormals included: half of it rounds to zero."""
        return math.ldexp(1.0, self.lowest)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    @property
    def _bias(self) -> int:
        return 2 ** (self.exponent_bits - 1) - 1

    def nearest(self, exact: Fraction) -> float:
        """Return the nearest number; a tie goes to the even one."""
        # The number is rounded once, exactly. A cast by way of float64 or float32 would round
        # twice.
        quantum = Fraction(2) ** max(exponent_of(exact) - self.mantissa_bits, self.lowest)
        rounded = round(exact / quantum) * quantum
        if abs(rounded) <= self.max:
            # Every number of every format is a float64. A fraction of zero has no sign.
            return math.copysign(float(rounded), exact)
        beyond = {"inf": math.inf, "nan": math.nan, "max": self.max}[self.beyond]
        return beyond if exact > 0 else -beyond

    def pattern(self, value: float) -> str:
        """Return sign, exponent and mantissa of one of the format's numbers."""
        code = self._code(abs(value))
        sign = 1 if math.copysign(1.0, value) < 0 else 0
        text = f"{code:0{self.bits - 1}b}"
        return f"{sign} {text[: self.exponent_bits]} {text[self.exponent_bits :]}"

    def _code(self, magnitude: float) -> int:
        highest = 2 ** (self.bits - 1) - 1
        if magnitude == 0:
            return 0
        if math.isnan(magnitude):
            return highest
        if math.isinf(magnitude):
            return highest + 1 - 2**self.mantissa_bits
        # Codes count the numbers from zero. From one to the next is one step, which is the same for
        # subnormal numbers and the first exponent, and doubles with each exponent after it.
        exact = Fraction(magnitude)
        step = max(exponent_of(exact) - self.mantissa_bits, self.lowest)
        return int(exact / Fraction(2) ** step) + (step - self.lowest) * 2**self.mantissa_bits


def exponent_of(exact: Fraction) -> int:
    """Return the exponent of the power of two at or below a number's magnitude."""
    if not exact:
        return 0
    top, bottom = abs(exact.numerator), exact.denominator
    # This is exact, unlike `math.log2`, which rounds just below a power of two. The guess is right
    # or one too high.
    guess = top.bit_length() - bottom.bit_length()
    return guess if Fraction(2) ** guess <= abs(exact) else guess - 1


def _of_policy(name: str, dtype: str, exponent: int, mantissa: int, *aliases: str) -> Layout:
    return Layout(
        name=name,
        dtype=dtype,
        exponent_bits=exponent,
        mantissa_bits=mantissa,
        beyond="inf",
        used_by="policy",
        aliases=(dtype, *aliases),
    )


def _of_recipe(
    dtype: str, exponent: int, mantissa: int, beyond: Literal["inf", "nan", "max"]
) -> Layout:
    return Layout(
        name=f"e{exponent}m{mantissa}",
        dtype=dtype,
        exponent_bits=exponent,
        mantissa_bits=mantissa,
        beyond=beyond,
        used_by="recipe",
    )


LAYOUTS = (
    _of_policy("f64", "float64", 11, 52, "fp64"),
    _of_policy("f32", "float32", 8, 23, "fp32", "full"),
    _of_policy("bf16", "bfloat16", 8, 7),
    _of_policy("f16", "float16", 5, 10, "fp16"),
    # Those of the Open Compute Project, of 8 and 4 bits.
    _of_recipe("float8_e4m3fn", 4, 3, "nan"),
    _of_recipe("float8_e5m2", 5, 2, "inf"),
    _of_recipe("float4_e2m1fn", 2, 1, "max"),
)
"""All formats that policies and recipes name, the widest first."""
