"""Run `halfstep examples`."""

import argparse
import dataclasses
import difflib
import functools
import json
import pathlib
import sys
import types
from collections.abc import Sequence

from halfstep._text import aligned
from halfstep.cli._command import (
    CommandError,
    answer,
    check_writable,
    kept_apart,
    write,
)
from halfstep.cli._run.bundle import Source, bundle, needed

# What is to be installed for what is imported beyond halfstep's own dependencies.
_EXTRAS = types.MappingProxyType(
    {
        "flax": "flax",
        "grain": "examples",
        "haiku": "haiku",
        "matplotlib": "examples",
        "tqdm": "examples",
    }
)
# The file through which an example reads images.
_IMAGES = "_data"


@dataclasses.dataclass(frozen=True)
class Example:
    """A training script.

    Attributes:
        name: Its name.
        sources: Its own file, and before it the files that it imports.
    """

    name: str
    sources: tuple[Source, ...]

    @property
    def summary(self) -> str:
        """What it shows."""
        return self.sources[-1].summary

    @property
    def extras(self) -> tuple[str, ...]:
        """The extras of halfstep that it needs."""
        roots = {
            (module or alias.name).split(".")[0]
            for source in self.sources
            for module, alias in source.imports
        }
        return tuple(sorted({_EXTRAS[root] for root in roots if root in _EXTRAS}))

    @property
    def data(self) -> str:
        """The data that it needs, and that is not made or found by itself."""
        images = any(source.name == _IMAGES for source in self.sources)
        return "Fashion-MNIST" if images else ""

    def to_dict(self) -> dict[str, object]:
        """Return a dictionary for JSON."""
        extras = list(self.extras)
        return {"name": self.name, "shows": self.summary, "extras": extras, "data": self.data}


def run(arguments: argparse.Namespace) -> int:
    """Run the subcommand."""
    with kept_apart(arguments):
        found = examples()
    if arguments.name is None:
        if arguments.out is not None:
            raise CommandError(
                f"--out {arguments.out} needs the name of an example. Choose from "
                f"{', '.join(found)}."
            )
        made = json.dumps({"examples": [one.to_dict() for one in found.values()]}, indent=2)
        answer(arguments, _listed(list(found.values())), made)
        return 0
    example = _chosen(found, arguments.name)
    text = bundle(example.sources)
    made = json.dumps({**example.to_dict(), "source": text}, indent=2)
    if arguments.out is None:
        # Not by way of `answer` alone, which wraps sentences: these are lines of Python.
        if arguments.json != "-":
            sys.stdout.write(text)
        answer(arguments, "", made)
        return 0
    path = _written(pathlib.Path(arguments.out), example, text)
    answer(arguments, _advice(example, path), made)
    return 0


def examples() -> dict[str, Example]:
    """Return all examples by name."""
    folder = _folder()
    names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    read = functools.cache(lambda name: Source(name, (folder / f"{name}.py").read_text()))
    return {name: Example(name, tuple(needed(read, name))) for name in names}


def _folder() -> pathlib.Path:
    """Return the folder with the examples: in the package if installed, next to it in a clone."""
    package = pathlib.Path(__file__).parents[2]
    for folder in (package / "_examples", package.parent / "examples"):
        if folder.is_dir():
            return folder
    raise CommandError(
        f"the examples are missing in {package}. Install halfstep again: "
        "pip install --force-reinstall --no-deps halfstep"
    )


def _chosen(found: dict[str, Example], name: str) -> Example:
    if name in found:
        return found[name]
    near = difflib.get_close_matches(name, found, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise CommandError(f"unknown example {name!r}.{hint} Choose from {', '.join(found)}.")


def _listed(found: Sequence[Example]) -> str:
    rows = [["example", "shows", "needs"]]
    for one in found:
        needs = [f"halfstep[{','.join(one.extras)}]"] if one.extras else []
        rows.append([one.name, one.summary, ", ".join([*needs, one.data] if one.data else needs)])
    return f'{aligned(rows, [False] * 3)}\n\n"halfstep examples NAME --out DIR" writes one file.'


def _written(folder: pathlib.Path, example: Example, text: str) -> pathlib.Path:
    path = folder / f"{example.name}.py"
    check_writable(str(path))
    # A file of that name may hold somebody's changes.
    if path.exists() and path.read_text() != text:
        raise CommandError(
            f"cannot write {path}: there is another file of that name. Give another folder, or "
            "move that file away."
        )
    write(str(path), text)
    return path


def _advice(example: Example, path: pathlib.Path) -> str:
    lines = [f"wrote {path}"]
    if example.extras:
        lines.append(f'install  pip install "halfstep[{",".join(example.extras)}]"')
    if example.data:
        lines.append(
            f"data     {example.data}: apt-get install dataset-fashion-mnist; or its four files "
            "in a folder, with --data DIR"
        )
    return "\n".join([*lines, f"run      python {path}"])
