"""What every benchmark shares: the JSON it writes, and with which versions it was made."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

import halfstep

RESULTS = pathlib.Path(__file__).parent / "results"


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # halfstep may be that of the working directory.
            found[package] = halfstep.__version__ if package == "halfstep" else "not installed"
    return found


def machine() -> dict[str, Any]:
    """What ran it, without what would name this one machine."""
    return {
        "cores": os.cpu_count(),
        "architecture": platform.machine(),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
    }


def _processor() -> str:
    """The model of the processor, where the system says it."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or "unknown"


def resident_bytes() -> int:
    """Memory of this process that is in use, as Linux counts it."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """An argument parser with `--json`, which every benchmark has."""
    made = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    made.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="write the results as JSON to FILE, or to standard output",
    )
    return made


def add_sources(
    options: argparse.ArgumentParser, *, drawn: str | None = None, quick: str | None = None
) -> None:
    """Add `--from`, and the options that a benchmark has: `--plot` and `--quick`.

    Args:
        options: The parser.
        drawn: What `--plot` draws; without it, the benchmark has no picture.
        quick: How small a quick run is; without it, the benchmark has none.
    """
    options.add_argument("--from", dest="source", metavar="FILE", help="an earlier report")
    if drawn is not None:
        options.add_argument("--plot", type=pathlib.Path, metavar="PNG", help=f"draw {drawn}")
    if quick is not None:
        options.add_argument("--quick", action="store_true", help=quick)


def read_or_make(given: argparse.Namespace, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The report of `--from`, or a new one."""
    return json.loads(pathlib.Path(given.source).read_text()) if given.source else make()


def report(module: str, results: dict[str, Any], *, packages: tuple[str, ...]) -> dict[str, Any]:
    """Results with what is needed to reproduce them."""
    return {
        "command": " ".join(["python", "-m", module, *sys.argv[1:]]),
        "versions": versions("halfstep", "jax", "jaxlib", "equinox", "optax", *packages),
        "machine": machine(),
        **results,
    }


def to_json(report: Mapping[str, Any]) -> str:
    """JSON with one line for each list of numbers: curves would else be thousands of lines."""
    text = json.dumps(report, indent=2)
    return re.sub(r"\[([^\[\]{}]*)\]", lambda m: f"[{' '.join(m[1].split())}]", text)


def write(report: dict[str, Any], where: str | None) -> None:
    """Write a report as JSON, if asked to."""
    text = to_json(report)
    if where == "-":
        print(text)
    elif where is not None:
        pathlib.Path(where).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(where).write_text(text + "\n")


def table(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """An aligned Markdown table: `columns` maps the keys of a row to headings."""
    cells = [list(columns.values())]
    cells += [["" if row.get(key) is None else str(row[key]) for key in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
