"""Implement `halfstep explain` and `halfstep lint`: show what autocast does, and judge it."""

import argparse

from halfstep.cli._command import (
    LOSS,
    Commands,
    add_command,
    add_json,
    add_maker,
    policy,
    share,
)

_EXPLAIN = f"""\
Say what autocast makes of a function: every operation with its line, its dtypes
and the reason, and what can be changed. Nothing runs, and nothing is judged;
that is what lint does.

{LOSS}
The exit status is 0, and 2 after an error.
"""

_LINT = f"""\
Say what autocast makes of a function, and what is wrong with it. Nothing runs.

{LOSS}
The exit status is 0, 1 if there are findings or contractions that are not
lowered (with --f8: not in 8 bits), and 2 after an error.
"""


def add(commands: Commands) -> None:
    """Add `explain` and `lint`, which judges the report of `explain`."""
    parser = add_command(
        commands,
        "explain",
        _explain,
        help="what does autocast make of it?",
        description=_EXPLAIN,
        example="halfstep explain train.py:make_loss --policy bf16 --html report.html",
    )
    _add_options(parser)
    linter = add_command(
        commands,
        "lint",
        _lint,
        help="does it run in the precision that it should?",
        description=_LINT,
        example="halfstep lint train.py:make_loss --policy bf16 --low 0.99 --json report.json",
    )
    _add_options(linter)
    linter.add_argument(
        "--low",
        type=share,
        default=0.99,
        help="share of the contractions' FLOPs that must be at the compute dtype (0.99)",
    )
    linter.add_argument(
        "--f8",
        type=share,
        help="share of the eligible contractions' FLOPs that must be in 8 bits",
    )
    linter.add_argument(
        "--max-findings", type=int, default=0, help="how many findings there may be (0)"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a report, and where to write it."""
    add_maker(parser, "make_loss")
    parser.add_argument(
        "--policy", type=policy, default="bf16", help="bf16, f8, p=f32,c=f16, or a file.toml (bf16)"
    )
    parser.add_argument(
        "--min-bytes", type=int, default=2**20, help="smaller values are not reported (1048576)"
    )
    parser.add_argument(
        "--values",
        action="store_true",
        help="run it once, and look whether its products are within float16's range",
    )
    parser.add_argument("--full", action="store_true", help="print every operation")
    add_json(parser)
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")


def _explain(arguments: argparse.Namespace) -> int:
    from halfstep.cli._run import explain

    return explain.show(arguments)


def _lint(arguments: argparse.Namespace) -> int:
    from halfstep.cli._run import explain

    return explain.lint(arguments)
