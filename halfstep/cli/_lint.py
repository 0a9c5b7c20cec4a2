"""`halfstep lint`: does it run in the precision that it should?"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from halfstep._explain import LintError
from halfstep.cli._arguments import LOSS, add_command, share
from halfstep.cli._explain import add_options, explained

_DESCRIPTION = f"""\
Say what autocast makes of a function, and what is wrong with it. Nothing runs.

{LOSS}
The exit status is 0, 1 if there are findings or contractions that are not
lowered (with --f8: not in 8 bits), and 2 if there is no answer.
"""


def add(commands: Any) -> None:
    """Add the subcommand to the command."""
    parser = add_command(
        commands,
        "lint",
        run,
        help="does it run in the precision that it should?",
        description=_DESCRIPTION,
        example="halfstep lint train.py:make_loss --policy bf16 --low 0.99 --json report.json",
    )
    add_options(parser)
    parser.add_argument(
        "--low",
        type=share,
        default=0.99,
        help="share of the contractions' FLOPs that must be at the compute dtype (0.99)",
    )
    parser.add_argument(
        "--f8",
        type=share,
        help="share of the eligible contractions' FLOPs that must be in 8 bits",
    )
    parser.add_argument(
        "--max-findings", type=int, default=0, help="how many findings there may be (0)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    report = explained(arguments)
    try:
        report.check(low=arguments.low, max_findings=arguments.max_findings, f8=arguments.f8)
    except LintError as error:
        sys.stderr.write("".join(f"{line}\n" for line in _why(str(error))))
        return 1
    return 0


def _why(message: str) -> Iterator[str]:
    """Why the answer is no; the report has the findings, and not what to do about fp8."""
    of_f8 = False
    for line in message.split("\n"):
        if line.startswith("required: "):
            of_f8 = "eligible" in line
            yield line if of_f8 else line.rstrip(":")
        elif of_f8:
            yield line
