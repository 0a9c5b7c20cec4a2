"""Write the first screen of the README into the home page: `python -m docs.generators.home`.

The README is next to `docs`, the home page in it: links and pictures of the one would lead nowhere
on the other. With `--check` nothing is written, and the exit status is 1 if the page is stale.
"""

import pathlib
import re
import sys

from benchmarks._page import update

ROOT = pathlib.Path(__file__).parents[2]
README, PAGE = ROOT / "README.md", ROOT / "docs" / "index.md"
SECTION = re.compile(
    r"<!-- --8<-- \[start:first-screen\] -->\n(.*?)<!-- --8<-- \[end:first-screen\] -->", re.DOTALL
)


def render() -> str:
    """What lies between the README's marks, as seen from the folder of the docs."""
    (section,) = SECTION.findall(README.read_text())
    return re.sub(r"(\]\(|src=\"|srcset=\")docs/", r"\1", section).strip()


def main(argv: list[str] | None = None) -> int:
    return update(
        argv,
        module="docs.generators.home",
        about=__doc__,
        page=PAGE,
        name="first screen",
        text=render(),
    )


if __name__ == "__main__":
    sys.exit(main())
