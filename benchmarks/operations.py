"""Write the table of operations in the docs: `python -m benchmarks.operations [--check]`.

The page `docs/autocast.md` has it between two marks. It is made of the table that
`halfstep.autocast` reads, so that the page cannot say anything else.
"""

import pathlib
import sys

from benchmarks._page import update
from benchmarks._report import table
from halfstep._autocast import GROUPS

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "autocast.md"
BEGIN, END = "<!-- operations -->", "<!-- end of operations -->"


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
    return update(
        argv,
        module="benchmarks.operations",
        about=__doc__,
        page=PAGE,
        name="operations",
        text=render(),
    )


if __name__ == "__main__":
    sys.exit(main())
