"""`halfstep explain`: what does autocast make of it?"""

import argparse
from typing import Any

from halfstep._explain import ExplainReport, explain
from halfstep.cli._arguments import LOSS, add_command, add_maker, policy
from halfstep.cli._files import check_writable
from halfstep.cli._load import load_loss
from halfstep.cli._output import add_json, answer, kept_apart, write

_DESCRIPTION = f"""\
Say what autocast makes of a function: every operation with its line, its dtypes
and the reason, and what can be changed. Nothing runs, and nothing is judged;
that is what lint does.

{LOSS}
The exit status is 0, and 2 if there is no answer.
"""


def add(commands: Any) -> None:
    """Add the subcommand to the command."""
    parser = add_command(
        commands,
        "explain",
        run,
        help="what does autocast make of it?",
        description=_DESCRIPTION,
        example="halfstep explain train.py:make_loss --policy bf16 --html report.html",
    )
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what has to be known for a report, and where it goes."""
    add_maker(parser, "make_loss")
    parser.add_argument(
        "--policy", type=policy, default="bf16", help="bf16, f8, p=f32,c=f16, or a file.toml (bf16)"
    )
    parser.add_argument(
        "--min-bytes", type=int, default=2**20, help="smaller values are no finding (1048576)"
    )
    parser.add_argument(
        "--values",
        action="store_true",
        help="run it once, and look whether its products are within float16's range",
    )
    parser.add_argument("--full", action="store_true", help="print every operation")
    add_json(parser)
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    explained(arguments)
    return 0


def explained(arguments: argparse.Namespace) -> ExplainReport:
    """Make the report and show it."""
    check_writable(arguments.html, endings=(".html", ".htm"))
    with kept_apart(arguments):
        loss, args = load_loss(arguments.make_loss)
        report = explain(
            loss, arguments.policy, min_bytes=arguments.min_bytes, values=arguments.values
        )(*args)
    text = f"{report}\n\n{report.table(full=True)}" if arguments.full else str(report)
    answer(arguments, text, report.to_json())
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
