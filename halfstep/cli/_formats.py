"""Implement `halfstep formats`: show the number formats, and how each stores a number."""

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np

from halfstep._base import FORMATS, Format, aligned
from halfstep._policy import RECIPES
from halfstep.cli._command import Commands, add_command, add_json, answer, kept_apart

_DESCRIPTION = """\
Print the number formats: how many bits, the largest and the smallest number,
and the distance from 1 to the next one (eps). A policy names the first ones;
those of 8 and 4 bits belong to recipes such as f8, which keep a scale next to
each array.

With numbers, print how each format stores them: rounded to the nearest, as the
hardware does, without a scale.

The exit status is 0.
"""


# How a format stores a number.


@dataclasses.dataclass(frozen=True)
class Stored:
    """A number in a format.

    Attributes:
        format: The format's short name.
        value: The stored number.
        error: The relative error; `None` if it is not finite.
        bits: Sign, exponent and mantissa.
        note: What happened to the number.
    """

    format: str
    value: float
    error: float | None
    bits: str
    note: str

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON. Infinity and NaN, which JSON lacks, become strings."""
        value = self.value if math.isfinite(self.value) else str(self.value)
        return {**dataclasses.asdict(self), "value": value}


def number(text: str) -> Fraction:
    """Parse a number exactly."""
    exponent = re.search(r"e[+-]?(\d+)$", text.lower())
    try:
        # No format could store a number with an exponent of a million.
        if exponent is None or int(exponent[1]) <= 400:
            return Fraction(text)
    except (ValueError, ZeroDivisionError):
        pass
    raise ValueError(
        f"required a number such as 0.1, 1e-8 or 1/3, of at most 400 decimal places; got {text!r}"
    )


def stored(exact: Fraction, row: Format) -> Stored:
    """Return the nearest number of a format; a tie goes to the even one."""
    # The number is rounded once, exactly. A cast by way of float64 or float32 would round twice.
    lowest = math.frexp(row.smallest)[1] - 1
    quantum = Fraction(2) ** max(_exponent(exact) - row.mantissa_bits, lowest)
    rounded = round(exact / quantum) * quantum
    # Every number of every format is a float64. The format decides about numbers beyond its
    # largest.
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
    """Return the exponent of the power of two at or below a number's magnitude."""
    if not exact:
        return 0
    top, bottom = abs(exact.numerator), exact.denominator
    # This is exact, unlike `math.log2`, which rounds just below a power of two. The guess is right
    # or one too high.
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
    # A number of fewer than 8 bits is stored in its own byte; the bits above it are cut off.
    raw = int.from_bytes(made.tobytes(), "little") & (2**row.bits - 1)
    text = f"{raw:0{row.bits}b}"
    exponent = 1 + int(jnp.finfo(row.dtype).nexp)
    return f"{text[0]} {text[1:exponent]} {text[exponent:]}"


# The command.


def add(commands: Commands) -> None:
    """Add the subcommand to the command."""
    parser = add_command(
        commands,
        "formats",
        run,
        help="which number formats are there, and what do they store?",
        description=_DESCRIPTION,
        example="halfstep formats\nhalfstep formats 0.1 70000\nhalfstep formats -1e-8",
    )
    parser.add_argument(
        "numbers", metavar="NUMBER", nargs="*", type=_number, help="such as 0.1, 1e-8 or 1/3"
    )
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    formats = _all()
    with kept_apart(arguments):
        found = {text: [stored(value, row) for row in formats] for text, value in arguments.numbers}
    text = "\n\n".join(_of_number(*item) for item in found.items()) or _of_formats(formats)
    made: dict[str, Any] = {"formats": [_facts(row) for row in formats]}
    if found:
        made["numbers"] = {name: [row.to_dict() for row in rows] for name, rows in found.items()}
    answer(arguments, text, json.dumps(made, indent=2))
    return 0


def _all() -> tuple[Format, ...]:
    """Return the formats that a policy names, and those that only recipes use."""
    legs = [
        leg
        for recipe in RECIPES.values()
        for leg in (recipe.forward, recipe.input_gradient, recipe.weight_gradient)
        if leg is not None
    ]
    elements = {factor.element: factor.dtype for leg in legs for factor in leg}
    rows = [Format(name=name, dtype=dtype, aliases=()) for name, dtype in elements.items()]
    known = sorted(FORMATS.values(), key=lambda row: (-row.bits, row.name))
    return (*known, *sorted(rows, key=lambda row: (-row.bits, row.name)))


def _facts(row: Format) -> dict[str, Any]:
    return {
        "name": row.name,
        "dtype": row.dtype.name,
        "bits": row.bits,
        "exponent_bits": int(jnp.finfo(row.dtype).nexp),
        "mantissa_bits": row.mantissa_bits,
        "max": row.max,
        "tiny": row.tiny,
        "smallest": row.smallest,
        "eps": row.eps,
        "aliases": list(row.aliases),
        "used_by": "policy" if row.name in FORMATS else "recipe",
    }


def _of_formats(formats: Sequence[Format]) -> str:
    head = ["name", "dtype", "bits", "exponent", "mantissa", "largest"]
    lines = [[*head, "smallest normal", "smallest", "eps", "of a", "also"]]
    for row in formats:
        facts = _facts(row)
        lines.append(
            [
                row.name,
                facts["dtype"],
                *(str(facts[name]) for name in ("bits", "exponent_bits", "mantissa_bits")),
                *(f"{facts[name]:.5g}" for name in ("max", "tiny", "smallest", "eps")),
                facts["used_by"],
                ", ".join(row.aliases),
            ]
        )
    return aligned(lines, [False, False, *[True] * 7, False, False])


def _of_number(text: str, rows: Sequence[Stored]) -> str:
    lines = [["format", "stored", "relative error", "note", "sign exponent mantissa"]]
    for row in rows:
        error = "-" if row.error is None else f"{row.error:.2g}"
        lines.append([row.format, f"{row.value:.17g}", error, row.note, row.bits])
    # Bits count as a number: they are useless if they are cut.
    return f"{text}\n{aligned(_ljusted(lines), [False, True, True, False, True])}"


def _ljusted(lines: list[list[str]]) -> list[list[str]]:
    """Pad the last column, so that it begins at the left."""
    width = max(len(line[-1]) for line in lines)
    return [[*line[:-1], line[-1].ljust(width)] for line in lines]


def _number(text: str) -> tuple[str, Fraction]:
    text = text.strip()
    try:
        return text, number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}") from error
