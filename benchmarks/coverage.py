"""How much of the package do the tests run, and what is it that they do not?

    python -m benchmarks.coverage --json benchmarks/results/coverage.json
    python -m benchmarks.coverage --from COVERAGE_JSON --json FILE

Runs the tests of CI under coverage.py (`pip install pytest-cov`), lines and branches, also in the
processes that they start, and sorts what is left by why it is left. The exit status is 1 below
95 %.
"""

import ast
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks._report import parser, report, table, write

MODULE = "benchmarks.coverage"
ROOT = pathlib.Path(__file__).parents[1]
BAR = 95.0

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "halfstep/__main__.py": "the command, started as a user starts it",
        "halfstep/_preflight/compile/worker.py": "a compiler's process",
        "halfstep/integrations/_orbax/_checkpoints.py": "one of several processes of a run",
        "halfstep/_base/processes.py": "one of several processes of a run",
        "halfstep/integrations/_orbax/_leaves.py": "one of several processes of a run",
        "halfstep/reliability/_preemption.py": "one of several processes of a run",
        "halfstep/reliability/_watchdog.py": "a process that hangs, and is ended",
    }
)
"""Files of which other processes run parts: the tests see what these do, and nobody counts it."""

PROCESS, MESSAGE, FAILURE, REST = (
    "run in another process",
    "a message for a wrong argument",
    "when something else fails",
    "rare",
)
WHY: Mapping[str, str] = MappingProxyType(
    {
        PROCESS: "Tests start it and look at what it does; it is ended before it has counted.",
        MESSAGE: "Most are provoked in a process without the tests' type checker "
        "(`tests/test_plain_errors.py`), which would refuse the argument first.",
        FAILURE: "A package is missing, a file cannot be read, another version of JAX says it "
        "otherwise.",
        REST: "Shapes, programs of compilers and combinations that no test on each change has; "
        "some are in tests marked `slow`, or those for the oldest JAX.",
    }
)


def reason(file: str, tree: ast.Module, line: int) -> str:
    """Why a line is not run."""
    if file in ELSEWHERE:
        return PROCESS
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.lineno <= line <= (node.end_lineno or 0):
            return MESSAGE
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.lineno <= line <= (node.end_lineno or 0):
            return FAILURE
    return REST


def function(tree: ast.Module, line: int) -> str:
    """The innermost function or class that a line is in."""
    found = ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (
            node.lineno <= line <= (node.end_lineno or 0)
        ):
            found = node.name  # `walk` goes from outside to inside.
    return found or "module"


def left(measured: Mapping[str, Any], root: pathlib.Path) -> Iterator[dict[str, Any]]:
    """What is not run: by file, function and reason, how many lines."""
    for file, about in sorted(measured["files"].items()):
        tree = ast.parse((root / file).read_text())
        counted: dict[tuple[str, str], int] = {}
        for line in about["missing_lines"]:
            key = (function(tree, line), reason(file, tree, line))
            counted[key] = counted.get(key, 0) + 1
        for (name, why), lines in counted.items():
            yield {"file": file, "function": name, "why": why, "lines": lines}


def measure() -> dict[str, Any]:
    """What coverage.py says after CI's tests."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "coverage.json")
        options = ["--cov", "--cov-branch", f"--cov-report=json:{out}", "--cov-report="]
        fast = ["-m", "not slow", "--numprocesses", "2", "--dist", "worksteal", "--quiet"]
        plain = ["-o", "addopts=--strict-config --strict-markers"]
        command = [sys.executable, "-m", "pytest", *fast, *plain, *options]
        subprocess.run(command, cwd=ROOT, check=True)
        return json.loads(out.read_text())


def text(result: Mapping[str, Any]) -> str:
    """The figures, and what is left, for a page."""
    totals, rows = result["totals"], result["left"]
    by_reason = [
        {"why": why, "lines": sum(row["lines"] for row in rows if row["why"] == why), "text": said}
        for why, said in WHY.items()
    ]
    said = (
        f"{totals['percent']:.1f} % of {totals['lines'] + totals['branches']:,} lines and "
        f"branches: {totals['percent_lines']:.1f} % of the lines and "
        f"{totals['percent_branches']:.1f} % of the branches."
    )
    reasons = table(by_reason, {"why": "lines that are not run", "lines": "lines", "text": "why"})
    places = [
        {**row, "where": f"`{row['file']}`, `{row['function']}`"}
        for row in rows
        if row["why"] == REST
    ]
    listed = table(places, {"where": "rare", "lines": "lines"})
    return f"{said}\n\n{reasons}\n\n{listed}"


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--from", dest="source", metavar="FILE", help="coverage.py's own JSON")
    options.add_argument("--root", default=str(ROOT), help="where the sources of --from are")
    parsed = options.parse_args(argv)
    root = pathlib.Path(parsed.root)
    measured = json.loads(pathlib.Path(parsed.source).read_text()) if parsed.source else measure()
    totals = measured["totals"]
    made = {
        "totals": {
            "lines": totals["num_statements"],
            "branches": totals["num_branches"],
            "percent": totals["percent_covered"],
            "percent_lines": totals["percent_statements_covered"],
            "percent_branches": totals["percent_branches_covered"],
        },
        "left": list(left(measured, root)),
    }
    result = report(MODULE, made, packages=("coverage", "pytest"))
    write(result, parsed.json)
    print(text(result))
    return 0 if totals["percent_covered"] >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
