"""Write the table of operations in the docs: `python -m benchmarks.operations [--check]`.

The page `docs/autocast.md` has it between two marks. It is made of the table that
`halfstep.autocast` reads, so that the page cannot say anything else.
"""

import argparse
import pathlib
import re
import sys

from benchmarks._report import table
from halfstep._autocast import GROUPS

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "autocast.md"
BEGIN, END = "<!-- operations -->", "<!-- end of operations -->"
MARKED = re.compile(rf"{BEGIN}\n.*?{END}\n", re.DOTALL)


def render() -> str:
    """One line for each group of primitives."""
    rows = [
        {
            "rule": rule.value,
            "what": why,
            "names": ", ".join(f"`{name}`" for name in names),
        }
        for rule, why, names in GROUPS
    ]
    return table(rows, {"rule": "runs in", "what": "operations", "names": "JAX's primitives"})


def main(argv: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.operations", description=__doc__)
    arguments.add_argument("--check", action="store_true", help="fail if the page would change")
    check = arguments.parse_args(argv).check
    old = PAGE.read_text()
    if not MARKED.search(old):
        print(f"{PAGE.name} has no {BEGIN} ... {END}")
        return 1
    new = MARKED.sub(lambda _: f"{BEGIN}\n\n{render()}\n\n{END}\n", old)
    if new == old:
        return 0
    print(f"{'stale' if check else 'wrote'}: {PAGE.name}")
    if not check:
        PAGE.write_text(new)
    return 1 if check else 0


if __name__ == "__main__":
    sys.exit(main())
