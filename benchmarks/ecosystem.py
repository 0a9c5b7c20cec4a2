"""Other people's programs under every policy, by numbers: the page "Works with".

    python -m benchmarks.ecosystem --json FILE [PROGRAM ...]

Each program is tiny, unmodified, and runs in a process of its own. A program whose package is not
installed is left out. `--resume` keeps the figures that FILE has: of a run that was interrupted, or
that was made in another environment. Needs the group `ecosystem`, in an environment of its own, and
`ecosystem-oldest` in another.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks._report import parser, report, table, write

MODULE = "benchmarks.ecosystem"
SECONDS = 600
LEEWAY = 1.1
"""How much larger an error may be than that of casting inputs: medians of a few samples vary."""
SHARE = 0.9
"""Of the programs that compare."""
_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"


def _child(name: str, fault: str, known: str) -> None:
    from tests.ecosystem._examples import EXAMPLES
    from tests.ecosystem._measure import measure

    print(json.dumps(measure(EXAMPLES[name], fault=fault == "yes", known=json.loads(known))))


def measured(
    name: str, package: str, seconds: int, *, fault: bool, known: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One program in a process of its own.

    Args:
        name: Of the program.
        package: Of the program.
        seconds: After which it is ended.
        fault: Whether a fault is planted as well.
        known: Figures of an earlier run.
    """
    known = known or {}
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        # Otherwise a solver raises where a step with too high a loss scale is to be skipped.
        "EQX_ON_ERROR": "nan",
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": _FLAGS,
    }
    command = [sys.executable, "-m", MODULE, "--child", name, "yes" if fault else "no"]
    command.append(json.dumps(known))
    failed: dict[str, Any] = {"name": name, "package": package, **known}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        if "tracing" in known:
            # All else is known: only the planted fault takes so long.
            return {**failed, "note": f"needs more than {seconds} s for the planted infinity"}
        return {**failed, "failed": f"not done after {seconds} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it ended without a word"]
        return {**failed, "failed": lines[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


def no_worse(row: dict[str, Any]) -> bool | None:
    """Whether a gradient is as exact as by casting inputs; `None` where the two do not compare.

    Casting inputs that promotes back to float32 rounds weights and nothing else.
    """
    ours, theirs = row.get("bf16"), row.get("bf16_inputs")
    if not isinstance(ours, float) or not isinstance(theirs, float):
        return None
    return ours <= LEEWAY * theirs if row.get("inputs_run_low") is True else None


def bars(rows: Sequence[dict[str, Any]]) -> dict[str, bool]:
    """What has to hold."""
    numbers = [row for row in rows if isinstance(row.get("bf16"), float)]
    both = [row for row in numbers if isinstance(row.get("f16"), float)]
    compared = [kept for row in rows if (kept := no_worse(row)) is not None]
    return {
        "45 programs of 25 packages": len(rows) >= 45
        and len({row["package"] for row in rows}) >= 25,
        "all in bf16 and f16": len(both) == len(rows),
        "40 by numbers": len(numbers) >= 40,
        f"at most {LEEWAY:g} times the error of casting inputs, in {SHARE:.0%} of those compared": (
            sum(compared) >= SHARE * len(compared) > 0
        ),
    }


def shown(row: dict[str, Any]) -> dict[str, str]:
    """A row for people."""

    def figure(name: str) -> str:
        value = row.get(name)
        if isinstance(value, float):
            return f"{value:.2g}"
        return "" if value is None else "fails"

    return {
        "program": row["name"],
        "bf16": row.get("failed") or figure("bf16"),
        "inputs": figure("bf16_inputs") + ("" if row.get("inputs_run_low") is True else "*"),
        "f16": figure("f16"),
        "f8": figure("f8"),
        "share": figure("share"),
        "tracing": figure("tracing"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("programs", nargs="*", help="which of them (all)")
    options.add_argument("--seconds", type=int, default=SECONDS, help="at most, of each")
    options.add_argument("--no-fault", action="store_true", help="plant no faults")
    options.add_argument(
        "--resume", action="store_true", help="keep the figures that the file of --json has"
    )
    parsed = options.parse_args(argv)
    from tests.ecosystem._examples import EXAMPLES

    chosen = [EXAMPLES[name] for name in parsed.programs] or list(EXAMPLES.values())
    kept = _kept(parsed.json) if parsed.resume else {}
    rows: list[dict[str, Any]] = []
    for example in tqdm(chosen, desc="programs", disable=None):
        known = kept.get(example.name, {})
        installed = all(importlib.util.find_spec(module) for module in example.modules)
        if known and ("fault" in known or parsed.no_fault or not installed):
            rows.append({**known, "note": example.note})
        elif installed:
            made = measured(
                example.name,
                example.package,
                parsed.seconds,
                fault=not parsed.no_fault,
                known=known,
            )
            rows.append(made)
            print(json.dumps(made), file=sys.stderr, flush=True)
            # After each program, so that nothing is lost.
            results = {"rows": rows, "bars": bars(rows)}
            write(report(MODULE, results, packages=()), None if parsed.json == "-" else parsed.json)
    results = {"rows": rows, "bars": bars(rows)}
    lines = [shown(row) for row in rows]
    print(table(lines, {name: name for name in lines[0]}) if lines else "no package is installed")
    write(report(MODULE, results, packages=()), parsed.json)
    return 0 if all(results["bars"].values()) else 1


def _kept(path: str | None) -> dict[str, dict[str, Any]]:
    """The figures of an earlier run by program; a program that failed is tried again."""
    if path is None or path == "-" or not pathlib.Path(path).exists():
        return {}
    rows = json.loads(pathlib.Path(path).read_text())["rows"]
    figures = [{key: row[key] for key in row if key != "failed"} for row in rows]
    return {row["name"]: row for row in figures if "loss" in row}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(*sys.argv[2:])
        sys.exit()
    sys.exit(main())
