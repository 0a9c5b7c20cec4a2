"""What became of one random program, and of one with a planted error."""

import dataclasses
from collections.abc import Sequence

from tests.fuzz._oracle import (
    Case,
    Failure,
    Reference,
    Setting,
    Skipped,
    check,
    make_case,
    random_setting,
)
from tests.fuzz._plant import EFFECT, effect, plant
from tests.fuzz._program import Program
from tests.fuzz._shrink import shrunk

QUESTIONS = ("function", "rounding")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one program.

    Attributes:
        seed: From which the program was made.
        text: `"same"`, `"same, run"`, why it says nothing, or how it failed.
        failed: Whether it failed.
        setting: How it was cast.
        program: The program, if it failed.
        redrawn: How many programs of this seed have said nothing before.
    """

    seed: int
    text: str
    failed: bool = False
    setting: str = ""
    program: str = ""
    redrawn: int = 0


def outcome(seed: int, questions: Sequence[str] = QUESTIONS, *, shrink: float = 0) -> Outcome:
    """Make a program, cast it and compare.

    Args:
        seed: Of the program.
        questions: What is asked of it.
        shrink: For how many seconds to look for a smaller program, if it fails.
    """
    try:
        case = make_case(seed)
        reference = Reference(case)
    except Skipped as reason:
        return Outcome(seed, f"skipped: {reason}")
    setting = random_setting(reference)
    try:
        text = check(case, setting, questions=questions, plain=reference)
        return Outcome(seed, text, setting=str(setting))
    except Skipped as reason:
        return Outcome(seed, f"skipped: {reason}", setting=str(setting))
    except Failure as failure:
        program = case.program
        if shrink:
            program = _smaller(case, setting, failure.kind, questions, shrink)
        return Outcome(seed, str(failure), True, str(setting), program.source())


def _smaller(
    case: Case, setting: Setting, kind: str, questions: Sequence[str], seconds: float
) -> Program:
    def fails(program: Program) -> bool:
        try:
            smaller = Case(program, case.parameters, case.values, case.seed)
            check(smaller, setting, questions=questions)
        except Failure as failure:
            return failure.kind == kind
        except Skipped:
            return False
        return False

    return shrunk(case.program, fails, seconds)


def found(seed: int, kind: str, by: float, questions: Sequence[str] = QUESTIONS) -> str | None:
    """Which question finds a planted error: its kind, `""` for none of them.

    Args:
        seed: Of the program.
        kind: `"forward"` or `"backward"`.
        by: The size of the error, as a share.
        questions: What is asked.

    Returns:
        `None` if the program says nothing, or the error has no effect on it.
    """
    try:
        case = make_case(seed)
        planted = plant(case, kind, by)
        if planted is None:
            return None
        reference = Reference(case)
        if not effect(reference, planted) >= EFFECT * by / 0.1:
            return None
        check(planted, random_setting(reference), questions=questions, plain=reference)
    except Skipped:
        return None
    except Failure as failure:
        return failure.kind
    return ""
