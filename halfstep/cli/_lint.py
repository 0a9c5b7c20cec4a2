"""`halfstep lint`: does it run in the precision that it should?"""

import argparse
import contextlib
import inspect
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from halfstep._explain import ExplainReport, LintError, explain
from halfstep.cli._arguments import policy, share
from halfstep.cli._errors import CommandError
from halfstep.cli._files import check_writable
from halfstep.cli._load import checked_pair, load

_DESCRIPTION = """\
Say what autocast makes of a function, and what is wrong with it. Nothing runs.

MAKE_LOSS names a function that returns a loss and its arguments (arrays or
jax.ShapeDtypeStructs), of which the first holds the parameters:

    def make_loss():
        ...
        return loss, (params, batch)

The exit status is 0, 1 if there are findings or contractions that are not
lowered (with --f8: not in 8 bits), and 2 if there is no answer.
"""


def add(commands: Any) -> None:
    """Add the subcommand to the command."""
    parser = commands.add_parser(
        "lint",
        help="does it run in the precision that it should?",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "make_loss", metavar="MAKE_LOSS", help="module:function or file.py:function"
    )
    parser.add_argument(
        "--policy", type=policy, default="bf16", help="bf16, f8, p=f32,c=f16, or a file.toml (bf16)"
    )
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
    parser.add_argument(
        "--min-bytes", type=int, default=2**20, help="smaller values are no finding (1048576)"
    )
    parser.add_argument(
        "--values",
        action="store_true",
        help="run it once, and look whether its products are within float16's range",
    )
    parser.add_argument("--full", action="store_true", help="print every operation")
    parser.add_argument("--json", metavar="FILE", help="write everything; - is standard output")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    if arguments.json != "-":
        check_writable(arguments.json)
    check_writable(arguments.html, endings=(".html", ".htm"))
    # What the user's code prints does not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr if arguments.json == "-" else sys.stdout):
        name, make = arguments.make_loss, load(arguments.make_loss)
        try:
            inspect.signature(make).bind()
        except TypeError as error:
            raise CommandError(
                f"{name} is called without arguments; its signature is "
                f"{inspect.signature(make)}: {error}."
            ) from error
        loss, args = checked_pair(name, make(), "loss")
        report = explain(
            loss, arguments.policy, min_bytes=arguments.min_bytes, values=arguments.values
        )(*args)
    _show(report, arguments)
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


def _show(report: ExplainReport, arguments: argparse.Namespace) -> None:
    try:
        if arguments.json == "-":
            sys.stdout.write(f"{report.to_json()}\n")
        else:
            sys.stdout.write(f"{report}\n")
            if arguments.full:
                sys.stdout.write(f"\n{report.table(full=True)}\n")
            if arguments.json:
                report.to_json(arguments.json)
        if arguments.html:
            pathlib.Path(arguments.html).write_text(_page(report))
    except OSError as error:
        raise CommandError(str(error)) from error


def _page(report: ExplainReport) -> str:
    body = report._repr_html_()  # pyright: ignore[reportPrivateUsage]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark">'
        "<title>halfstep lint</title>"
        "<style>body{font:14px system-ui,sans-serif;margin:1.5em}</style>"
        f"</head><body>{body}</body></html>\n"
    )
