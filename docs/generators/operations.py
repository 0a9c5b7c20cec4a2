"""Write the list of operations: `python -m docs.generators.operations [--check]`.

The page `docs/operations.md` has it between two marks. It is made of the table that
`halfstep.autocast` reads, so that the page cannot say anything else.
"""

import pathlib
import sys

from benchmarks._page import update
from benchmarks._report import table
from halfstep._autocast import GROUPS, TABLE
from halfstep._autocast.decide import _NEVER_AGAIN, _PLANNERS
from halfstep._autocast.primitives import CONTRACTIONS, Rule

PAGE = pathlib.Path(__file__).parents[1] / "operations.md"

DTYPES = {
    Rule.COMPUTE: "the compute dtype",
    Rule.FLOAT32: "float32",
    Rule.WIDEST: "the widest of its operands",
    Rule.FOLLOW: "its operand's dtype",
    Rule.AS_TRACED: "as it is written",
}


def rows() -> list[dict[str, str]]:
    """One for each primitive, by its name."""
    reasons = {name: why for _, why, names in GROUPS for name in names}
    whole = CONTRACTIONS | _NEVER_AGAIN
    found = [
        {
            "name": f"`{name}`",
            "class": rule.value,
            "dtype": DTYPES[rule],
            "again": "never" if name in whole else "",
            "why": reasons[name],
        }
        for name, rule in TABLE.items()
    ]
    found += [
        {
            "name": f"`{name}`",
            "class": "by what is inside",
            "dtype": "each operation its own",
            "why": "loops, branches, calls and functions with derivative rules",
        }
        for name in _PLANNERS
    ]
    return sorted(found, key=lambda row: row["name"].strip("`").lower())


def render() -> str:
    columns = {
        "name": "primitive",
        "class": "class",
        "dtype": "runs in",
        "again": "recomputed",
        "why": "because it is one of",
    }
    return table(rows(), columns)


def main(argv: list[str] | None = None) -> int:
    return update(
        argv,
        module="docs.generators.operations",
        about=__doc__,
        page=PAGE,
        name="operations",
        text=render(),
    )


if __name__ == "__main__":
    sys.exit(main())
