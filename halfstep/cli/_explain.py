"""Implement `halfstep explain` and `halfstep lint`: show what autocast does, and judge it."""

import argparse
import sys
from collections.abc import Iterator

from halfstep._explain import ExplainReport, LintError, explain
from halfstep.cli._command import (
    LOSS,
    Commands,
    add_command,
    add_json,
    add_maker,
    answer,
    check_writable,
    kept_apart,
    policy,
    share,
    write,
)
from halfstep.cli._load import load_loss

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
    _explained(arguments)
    return 0


def _lint(arguments: argparse.Namespace) -> int:
    report = _explained(arguments)
    try:
        report.check(low=arguments.low, max_findings=arguments.max_findings, f8=arguments.f8)
    except LintError as error:
        sys.stderr.write("".join(f"{line}\n" for line in _why(str(error))))
        return 1
    return 0


def _why(message: str) -> Iterator[str]:
    """Yield the lines that say why the answer is no.

    The report already has the findings, but not what to do about fp8.
    """
    of_f8 = False
    for line in message.split("\n"):
        if line.startswith("required: "):
            of_f8 = "eligible" in line
            yield line if of_f8 else line.rstrip(":")
        elif of_f8:
            yield line


def _explained(arguments: argparse.Namespace) -> ExplainReport:
    """Make the report and show it."""
    check_writable(arguments.html, endings=(".html", ".htm"))
    with kept_apart(arguments):
        loss, args = load_loss(arguments.make_loss)
        report = explain(
            loss, arguments.policy, min_bytes=arguments.min_bytes, values=arguments.values
        )(*args)
    text = f"{report}\n\n{report.table(full=True)}" if arguments.full else str(report)
    # In a terminal, the table is asked for by an option.
    answer(arguments, text.replace("table(full=True)", "--full"), report.to_json())
    if arguments.html:
        write(arguments.html, _page(report))
    return report


def _page(report: ExplainReport) -> str:
    body = report._repr_html_()  # pyright: ignore[reportPrivateUsage]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark">'
        "<title>halfstep explain</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:1.5em}</style>"
        f"</head><body>{body}</body></html>\n"
    )
