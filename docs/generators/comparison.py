"""Write the documented part of the comparison: `python -m docs.generators.comparison [--check]`.

The page `docs/comparison.md` has three tables that are read from the documentation of each library,
with links. They are written from `benchmarks/_documented.py`; the tables of probes below them are
those of `benchmarks.render`.
"""

import pathlib
import sys

from benchmarks._documented import (
    EXPERIENCE,
    FEATURES,
    LARGE,
    LIBRARIES,
    OURS,
    PROBED,
    READ,
    SMALLER,
    Row,
    Said,
)
from benchmarks._page import update_all
from benchmarks._report import table

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "comparison.md"


def cell(said: Said) -> str:
    """A statement, as a link to the page that makes it."""
    return f"[{said.text}]({said.page})"


def by_feature(rows: tuple[Row, ...]) -> str:
    """A table with a column for each library."""
    heads = {key: LIBRARIES[key].name for key in LARGE}
    lines = [
        {"row": row.title, **{key: cell(said) for key, said in row.cells.items()}} for row in rows
    ]
    return table(lines, {"row": "", **heads})


def by_library() -> str:
    """A table with a line for each library that is also probed."""
    lines = [
        {"library": LIBRARIES[key].name, **{row.title: cell(row.cells[key]) for row in SMALLER}}
        for key in PROBED
    ]
    return table(lines, {"library": "library", **{row.title: row.title for row in SMALLER}})


def read() -> str:
    """The versions that were read, with links."""
    listed = [f"[{one.name}]({one.page}): {one.read}" for k, one in LIBRARIES.items() if k != OURS]
    return f"Read on {READ}. " + "; ".join(listed) + "."


PARTS = {
    "experience": lambda: by_feature(EXPERIENCE),
    "features": lambda: by_feature(FEATURES),
    "smaller libraries": by_library,
    "versions read": read,
}


def main(argv: list[str] | None = None) -> int:
    module = "docs.generators.comparison"
    return update_all(argv, module=module, about=__doc__, page=PAGE, parts=PARTS)


if __name__ == "__main__":
    sys.exit(main())
