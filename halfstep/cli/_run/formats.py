"""Run `halfstep formats`."""

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from halfstep._text import aligned
from halfstep.cli._command import answer, kept_apart
from halfstep.cli._run.layouts import LAYOUTS, Layout

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


def stored(exact: Fraction, row: Layout) -> Stored:
    """Return the nearest number of a format; a tie goes to the even one."""
    value = row.nearest(exact)
    error = None
    if math.isfinite(value):
        error = float(abs((Fraction(value) - exact) / exact)) if exact else 0.0
    return Stored(row.name, value, error, row.pattern(value), _note(exact, value, row))


def _note(exact: Fraction, value: float, row: Layout) -> str:
    if not math.isfinite(value):
        return f"overflow: beyond {row.max:.6g}, the largest"
    if abs(exact) > row.max and abs(value) == row.max:
        return "saturated: the largest"
    if value == exact:
        return "exact"
    if value == 0:
        return f"underflow: below half of {row.smallest:.3g}, the smallest"
    return "subnormal: fewer bits are left" if abs(value) < row.tiny else ""


# The command.


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    with kept_apart(arguments):
        found = {text: [stored(value, row) for row in LAYOUTS] for text, value in arguments.numbers}
    text = "\n\n".join(_of_number(*item) for item in found.items()) or _of_formats(LAYOUTS)
    made: dict[str, Any] = {"formats": [_facts(row) for row in LAYOUTS]}
    if found:
        made["numbers"] = {name: [row.to_dict() for row in rows] for name, rows in found.items()}
    answer(arguments, text, json.dumps(made, indent=2))
    return 0


def _facts(row: Layout) -> dict[str, Any]:
    return {
        "name": row.name,
        "dtype": row.dtype,
        "bits": row.bits,
        "exponent_bits": row.exponent_bits,
        "mantissa_bits": row.mantissa_bits,
        "max": row.max,
        "tiny": row.tiny,
        "smallest": row.smallest,
        "eps": row.eps,
        "aliases": list(row.aliases),
        "used_by": row.used_by,
    }


def _of_formats(formats: Sequence[Layout]) -> str:
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
