"""Errors planted in programs, to see what the oracle finds."""

import copy
import random

from tests.fuzz._oracle import Case, Reference, apart
from tests.fuzz._program import Program, Statement, is_float

EFFECT = 1e-3
"""By what share a planted error must change a result to count: no oracle sees what has no effect,
such as a factor in front of a normalization."""


def plant(case: Case, kind: str, by: float) -> Case | None:
    """The same program with one value, or one gradient, that is too large by a share.

    Args:
        case: The program.
        kind: `"forward"` or `"backward"`.
        by: The share.

    Returns:
        `None` if the program has no floating-point value.
    """
    choice = random.Random(case.seed)
    program = copy.deepcopy(case.program)
    values = program.values()
    first = len(program.arguments)
    places = [number for number in range(first, len(values)) if is_float(values[number])]
    if not places:
        return None
    number = choice.choice(places)
    # The statement after which it stands, and the numbers of what comes after it.
    made, position = first, 0
    while made <= number:
        made += len(program.statements[position].results)
        position += 1
    text = f"wrong_{kind}({{0}}, {by})"

    def renumbered(old: int) -> int:
        if old < made and old != number:
            return old
        return made if old == number else old + 1

    later = program.statements[position:]
    for line in later:
        line.operands = tuple(renumbered(old) for old in line.operands)
    wrong = Statement(text, (number,), (values[number],))
    planted = Program(
        program.arguments,
        [*program.statements[:position], wrong, *later],
        [renumbered(old) for old in program.returned],
    )
    return Case(planted, case.parameters, case.values, case.seed)


def effect(reference: Reference, planted: Case) -> float:
    """By how much a planted error changes any result without rounding."""
    wrong = Reference(planted)
    pairs = zip(reference.exact, wrong.exact, strict=True)
    return max((apart(want, have) for want, have in pairs), default=0.0)
