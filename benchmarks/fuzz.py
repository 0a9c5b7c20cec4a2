"""Texts that nobody would write, given to all that reads texts: policies, rules, policy files.

    python -m benchmarks.fuzz --json FILE

libFuzzer, by Atheris, makes them up and follows what they reach in the code. A text is a policy,
which is the same after it has been written and read again, or an error of the kind that is
documented: anything else is a crash, and the exit status is 1. Needs the group `fuzz`.
"""

import importlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks._report import parser, report, table, write

MODULE = "benchmarks.fuzz"
RUNS = 1_000_000
DICTIONARY = (
    *(
        "bf16",
        "f16",
        "f32",
        "f8",
        "f8-delayed",
        "nvfp4",
        "p=",
        "c=",
        "o=",
        "keep=",
        "op:",
        "scope:",
    ),
    *("=float32", "=compute", "=accumulate", "=widest", "=as_traced", "accumulate=", "recipe="),
    *("residuals=e4m3", ":inputs", ",", "@", "**", "*", "?", "/", "dot_general", "exp", "state"),
    *('compute = "', 'rules = ["', 'keep = ["', 'mode = "inputs"', "\n", '"]', '"', "#", "\\u0041"),
)


def _policy(text: str) -> None:
    from halfstep import Policy

    try:
        made = Policy.parse(text)
    except ValueError:
        return
    assert Policy.parse(str(made)) == made, text


def _rule(text: str) -> None:
    from halfstep import PrecisionRule

    try:
        made = PrecisionRule.parse(text)
    except ValueError:
        return
    assert PrecisionRule.parse(str(made)) == made, text


def _file(text: str) -> None:
    from halfstep import Policy
    from halfstep._policy.policy import from_toml, to_toml

    names = ("param", "compute", "output", "keep", "rules", "accumulate", "recipe", "mode")
    try:
        fields = from_toml(text, "policy.toml", names)
        made = Policy(**fields)
    except (ValueError, TypeError):
        return
    again = from_toml(to_toml(fields, ["note"]), "policy.toml", names)
    assert Policy(**again) == made, text


TARGETS: dict[str, Callable[[str], None]] = {"policy": _policy, "rule": _rule, "file": _file}


def _child(target: str, arguments: Sequence[str]) -> None:
    # Its types are not known to everyone: it is installed for this alone.
    atheris: Any = importlib.import_module("atheris")

    with atheris.instrument_imports(include=["halfstep._policy"]):
        importlib.import_module("halfstep._policy")

    def one(data: bytes) -> None:
        TARGETS[target](data.decode("utf-8", errors="surrogateescape"))

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def fuzz(target: str, runs: int, seconds: int) -> dict[str, Any]:
    """One target, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = pathlib.Path(folder, "words")
        # libFuzzer wants bytes as it writes them.
        escaped = ("".join(f"\\x{byte:02x}" for byte in word.encode()) for word in DICTIONARY)
        words.write_text("".join(f'"{word}"\n' for word in escaped))
        corpus = pathlib.Path(folder, "corpus")
        corpus.mkdir()
        command = [sys.executable, "-m", MODULE, "--child", target, str(corpus)]
        command += [f"-dict={words}", f"-runs={runs}", "-max_len=200", "-seed=1"]
        command += [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        found = re.findall(r"Done (\d+) runs", done.stderr)
        reached = re.findall(r"ft: (\d+)", done.stderr)
        return {
            "target": target,
            "executions": int(found[-1]) if found else 0,
            "reached": int(reached[-1]) if reached else 0,
            "crashed": done.returncode != 0,
            "said": done.stderr[-2000:] if done.returncode else "",
        }


def bars(rows: Sequence[dict[str, Any]], runs: int) -> dict[str, bool]:
    """What has to hold."""
    return {
        f"{row['target']}: {runs:,} executions without a crash": not row["crashed"]
        and row["executions"] >= runs
        for row in rows
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--runs", type=int, default=RUNS, help=f"of each target ({RUNS:,})")
    options.add_argument("--seconds", type=int, default=3600, help="at most, of each target")
    parsed = options.parse_args(argv)
    rows = [fuzz(target, parsed.runs, parsed.seconds) for target in TARGETS]
    results = {"rows": rows, "bars": bars(rows, parsed.runs)}
    shown = ("target", "executions", "reached", "crashed")
    print(table(rows, {name: name for name in shown}), file=sys.stderr)
    for row in rows:
        print(row["said"], file=sys.stderr)
    write(report(MODULE, results, packages=("atheris",)), parsed.json)
    return 0 if all(results["bars"].values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], sys.argv[3:])
    sys.exit(main())
