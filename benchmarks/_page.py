"""A part of a page that is made by code: written between two marks, or checked to be as made."""

import argparse
import pathlib
import re
from collections.abc import Callable, Mapping


def update(
    argv: list[str] | None,
    *,
    module: str,
    about: str | None,
    page: pathlib.Path,
    name: str,
    text: str,
) -> int:
    """Write `text` between the marks of `name` on a page, or with `--check` fail if it differs."""
    arguments = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    arguments.add_argument("--check", action="store_true", help="fail if the page would change")
    check = arguments.parse_args(argv).check
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    marked = re.compile(rf"{begin}\n.*?{end}\n", re.DOTALL)
    old = page.read_text()
    if not marked.search(old):
        print(f"{page.name} has no {begin} ... {end}")
        return 1
    new = marked.sub(lambda _: f"{begin}\n\n{text}\n\n{end}\n", old)
    if new == old:
        return 0
    print(f"{'stale' if check else 'wrote'}: {page.name}")
    if not check:
        page.write_text(new)
    return 1 if check else 0


def update_all(
    argv: list[str] | None,
    *,
    module: str,
    about: str | None,
    page: pathlib.Path,
    parts: Mapping[str, Callable[[], str]],
) -> int:
    """As `update`, for all parts of a page: what makes each, by its name."""
    return max(
        update(argv, module=module, about=about, page=page, name=name, text=make())
        for name, make in parts.items()
    )
