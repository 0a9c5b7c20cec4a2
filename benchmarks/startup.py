"""CPU time until something can be used: imports and commands, compared with `import jax`.

    python -m benchmarks.startup --json FILE

Each row is a process of its own. In every round all of them run, one after the other, and each is
divided by the `import jax` of its round: a machine that is slow for a while is slow for both. CPU
time is that of user and system, as the operating system counts it for the process. A first round
is not counted; it writes the files of bytecode that Python keeps.

`import halfstep` imports JAX and little else, and each name is imported when it is first used. So
the rows of first uses are the ones that users wait for. The exit status is 1 if a bar is missed.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._report import parser, report, table, write

MODULE = "benchmarks.startup"
ROOT = pathlib.Path(__file__).parents[1]
UNIT = "import jax"
DEPENDENCIES = "import jax, equinox, optax"
# The most that each may take, in units of `import jax`.
COMMAND, LIBRARY = 0.15, 1.25

IMPORTS = (
    UNIT,
    "import jax, equinox",
    "import jax, optax",
    DEPENDENCIES,
    "import halfstep",
    "import halfstep; halfstep.autocast",
    "import halfstep; halfstep.filter_value_and_grad",
    "import halfstep; halfstep.optim",
    "from halfstep import *",
)
COMMANDS = (
    "--help",
    "--version",
    "preflight --help",
    "formats",
    "formats 0.1",
)
BARS: Mapping[str, float] = {
    "import halfstep": LIBRARY,
    "import halfstep; halfstep.autocast": LIBRARY,
    **{f"halfstep {words}": COMMAND for words in COMMANDS},
}
# What an installer writes for `[project.scripts]`.
SCRIPT = "import sys\nfrom halfstep.cli import main\nsys.exit(main())\n"


def rows(folder: pathlib.Path) -> dict[str, list[str]]:
    """The words of each process."""
    script = folder / "halfstep"
    script.write_text(SCRIPT)
    made = {code: [sys.executable, "-c", code] for code in IMPORTS}
    for words in COMMANDS:
        made[f"halfstep {words}"] = [sys.executable, str(script), *words.split()]
    return made


def seconds(words: Sequence[str]) -> float:
    """CPU time of a process, which must succeed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{words} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


def measure(rounds: int) -> dict[str, Any]:
    """Run everything in turn, and return medians."""
    with tempfile.TemporaryDirectory() as folder:
        processes = rows(pathlib.Path(folder))
        found = [
            {name: seconds(words) for name, words in processes.items()} for _ in range(rounds + 1)
        ][1:]
    made = []
    for name in processes:
        made.append(
            {
                "what": name,
                "seconds": statistics.median(one[name] for one in found),
                "to_jax": statistics.median(one[name] / one[UNIT] for one in found),
                "to_dependencies": statistics.median(
                    one[name] / one[DEPENDENCIES] for one in found
                ),
                "least_seconds": min(one[name] for one in found),
                "bar": BARS.get(name),
            }
        )
    return {"rounds": rounds, "rows": made, "bars": bars(made)}


def bars(made: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Which bars hold."""
    return {
        f"{row['what']}: at most {row['bar']} of {UNIT}": row["to_jax"] <= row["bar"]
        for row in made
        if row["bar"] is not None
    }


def text(result: Mapping[str, Any]) -> str:
    """The table and what it says."""
    columns = {
        "what": "what runs",
        "time": "CPU time",
        "jax": "to `import jax`",
        "all": "to JAX, Equinox, Optax",
        "bar": "at most",
    }
    lines = [
        {
            "what": f"`{row['what']}`",
            "time": f"{row['seconds']:.2f} s",
            "jax": f"{row['to_jax']:.2f}",
            "all": f"{row['to_dependencies']:.2f}",
            "bar": "" if row["bar"] is None else f"{row['bar']}",
        }
        for row in result["rows"]
    ]
    missed = [name for name, met in result["bars"].items() if not met]
    end = f"**Missed**: {'; '.join(missed)}." if missed else "All bars were met."
    return (
        f"{table(lines, columns)}\n\n"
        f"Medians of {result['rounds']} rounds. In each round all processes ran in turn; ratios "
        "are taken in each round. After `import halfstep;` stands the name that is used first. "
        "halfstep requires Equinox and Optax, and a program that imports them has paid their part "
        f"already. {end}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    options = parser(MODULE, __doc__ or "")
    options.add_argument("--rounds", type=int, default=15, help="counted rounds (15)")
    options.add_argument("--quick", action="store_true", help="two rounds")
    given = options.parse_args(argv)
    result = measure(2 if given.quick else given.rounds)
    print(text(result))
    write(report(MODULE, result, packages=("jaxtyping",)), given.json)
    return 0 if all(result["bars"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
