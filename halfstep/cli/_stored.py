"""How a number format stores a number, from the number as it is written."""

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from halfstep._base import Format


@dataclasses.dataclass(frozen=True)
class Stored:
    """A number in a format.

    Attributes:
        format: The format's short name.
        value: What is stored.
        error: The relative error; `None` where there is no finite one.
        bits: Sign, exponent and mantissa.
        note: What happened to it.
    """

    format: str
    value: float
    error: float | None
    bits: str
    note: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity and no NaN: these are text."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        return {**dataclasses.asdict(self), "value": value}


def number(text: str) -> Fraction:
    """The number that is written, exactly."""
    exponent = re.search(r"e[+-]?(\d+)$", text.lower())
    try:
        # Of what an exponent of a million makes, no format could store anything.
        if exponent is None or int(exponent[1]) <= 400:
            return Fraction(text)
    except (ValueError, ZeroDivisionError):
        pass
    raise ValueError(
        f"required a number such as 0.1, 1e-8 or 1/3, of at most 400 decimal places; got {text!r}"
    )


def stored(exact: Fraction, row: Format) -> Stored:
    """The nearest number of a format; of two that are equally near, the even one."""
    # Rounded once, exactly. A cast by way of float64 or float32 would round twice.
    lowest = math.frexp(row.smallest)[1] - 1
    quantum = Fraction(2) ** max(_exponent(exact) - row.mantissa_bits, lowest)
    rounded = round(exact / quantum) * quantum
    # Every number of every format is a float64; what is beyond the largest, the format decides.
    wide = math.inf if exact > 0 else -math.inf
    if abs(rounded) <= np.finfo(np.float64).max:
        wide = float(rounded)
    with np.errstate(over="ignore", invalid="ignore"):
        made = np.asarray(wide, np.float64).astype(row.dtype)
    value = float(made)
    error = None
    if math.isfinite(value):
        error = float(abs((Fraction(value) - exact) / exact)) if exact else 0.0
    return Stored(row.name, value, error, _bits(made, row), _note(exact, value, row))


def _exponent(exact: Fraction) -> int:
    """The power of two at or below a number's magnitude."""
    if not exact:
        return 0
    top, bottom = abs(exact.numerator), exact.denominator
    guess = top.bit_length() - bottom.bit_length()
    return guess if Fraction(2) ** guess <= abs(exact) else guess - 1


def _note(exact: Fraction, value: float, row: Format) -> str:
    if not math.isfinite(value):
        return f"overflow: beyond {row.max:.6g}, the largest"
    if abs(exact) > row.max and abs(value) == row.max:
        return "saturated: the largest"
    if value == exact:
        return "exact"
    if value == 0:
        return f"underflow: below half of {row.smallest:.3g}, the smallest"
    return "subnormal: fewer bits are left" if abs(value) < row.tiny else ""


def _bits(made: np.ndarray, row: Format) -> str:
    raw = int.from_bytes(made.tobytes(), "little") & (2**row.bits - 1)
    text = f"{raw:0{row.bits}b}"
    exponent = 1 + int(jnp.finfo(row.dtype).nexp)
    return f"{text[0]} {text[1:exponent]} {text[exponent:]}"
