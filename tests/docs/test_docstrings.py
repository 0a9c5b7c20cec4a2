"""Docstrings of public functions and methods begin with a verb, as the API pages show them."""

import importlib
import inspect
import pathlib
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest

import halfstep

ROOT = pathlib.Path(halfstep.__file__).parent
# Words that begin a description of a thing and not of what a function does.
NOUNS = re.compile(
    r"(The|An?|This|That|It|Its|One|All|Both|Each|Every|What|Which|Where|When|Whether|How|Who|Why|"
    r"Of|In|For|With|As|If|From|No|Not|\w*(?<!s)s|\w+ing)$"
)
PACKAGES = ("", "compat", "debug", "integrations", "kernels", "optim", "quant", "reliability")


def modules() -> Iterator[types.ModuleType]:
    """The public modules; an integration whose framework is missing is left out."""
    for package in PACKAGES:
        name = f"halfstep.{package}".rstrip(".")
        yield importlib.import_module(name)
        if package in ("compat", "integrations"):
            for path in sorted((ROOT / package).glob("[!_]*.py")):
                try:
                    yield importlib.import_module(f"{name}.{path.stem}")
                except ImportError:
                    continue


def functions() -> Iterator[tuple[str, str]]:
    """Names and docstrings of public functions, and of the methods of public classes."""
    for module in modules():
        for name in dir(module):
            thing: Any = getattr(module, name)
            own = str(getattr(thing, "__module__", "")).startswith("halfstep")
            if name.startswith("_") or not own or inspect.ismodule(thing):
                continue
            label = f"{module.__name__}.{name}"
            if not inspect.isclass(thing):
                if callable(thing):
                    yield label, inspect.getdoc(thing) or ""
                continue
            for method, raw in vars(thing).items():
                if not method.startswith("_") and inspect.isroutine(raw):
                    yield f"{label}.{method}", inspect.getdoc(getattr(thing, method)) or ""


def begins_with_a_verb(docstring: str) -> bool:
    (word, *_) = docstring.split() or [""]
    return bool(re.fullmatch(r"[A-Z][a-z]+", word)) and not NOUNS.match(word)


def test_every_docstring_begins_with_a_verb():
    found = dict(functions())
    assert len(found) > 200
    assert {name: doc[:60] for name, doc in found.items() if not begins_with_a_verb(doc)} == {}


@pytest.mark.parametrize(
    ("docstring", "is_verb"),
    [
        ("Return the steps.", True),
        ("Express a rule.", True),
        ("The newest step.", False),
        ("Steps, oldest first.", False),
        ("`halfstep.plan`: search.", False),
        ("Rounding of a number.", False),
        ("", False),
    ],
)
def test_nouns_are_told_from_verbs(docstring: str, is_verb: bool):
    assert begins_with_a_verb(docstring) == is_verb
