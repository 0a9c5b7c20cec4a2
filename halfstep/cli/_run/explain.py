"""Run `halfstep explain` and `halfstep lint`."""

import argparse
import sys
from collections.abc import Iterator

from halfstep._explain import ExplainReport, LintError, explain
from halfstep.cli._command import answer, check_writable, kept_apart, write
from halfstep.cli._load import load_loss


def show(arguments: argparse.Namespace) -> int:
    """Run `explain`."""
    _explained(arguments)
    return 0


def lint(arguments: argparse.Namespace) -> int:
    """Run `lint`."""
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
