"""Find the function that `module:name` or `file.py:name` refers to."""

import difflib
import importlib
import importlib.util
import inspect
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

from halfstep.cli._command import CommandError


def load(text: str) -> Callable[..., Any]:
    """Import a function by `package.module:function` or `path/to/file.py:function`."""
    module_name, colon, name = text.rpartition(":")
    if not colon or not module_name or not name:
        raise CommandError(
            "the function is given as module:function or file.py:function, such as "
            f"train.py:make_step; got {text!r}."
        )
    # As with `python -m`, modules in the working directory can be imported.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = _module(module_name)
    except ModuleNotFoundError as error:
        raise CommandError(
            f"cannot import {module_name!r}: {error}. Install what is missing, or call it from the "
            "folder that has it."
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        # Suggest only functions: names of classes and modules that a script imports would be bad
        # advice.
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(name, own, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        what = "none of that name" if found is None else f"a {type(found).__name__} of that name"
        raise CommandError(f"{module_name!r} must have a function {name!r}; it has {what}.{hint}")
    return found


def load_loss(name: str) -> tuple[Callable[..., Any], tuple[Any, ...] | list[Any]]:
    """Return the loss that the user's function makes, and the arguments of the loss."""
    make = load(name)
    try:
        # Arguments are bound first, so that a TypeError of the function itself is not taken for a
        # wrong call.
        inspect.signature(make).bind()
    except TypeError as error:
        raise CommandError(
            f"{name} is called without arguments; its signature is {inspect.signature(make)}: "
            f"{error}. Give its parameters defaults."
        ) from error
    return checked_pair(name, make(), "loss")


def checked_pair(
    name: str, made: object, what: str
) -> tuple[Callable[..., Any], tuple[Any, ...] | list[Any]]:
    """Check that the user's function has returned a function and a tuple of its arguments."""
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise CommandError(
            f"{name} must return a {what} and a tuple of its arguments, ({what}, args); "
            f"got {_kind(made)}."
        )
    if not isinstance(made[1], tuple | list):
        raise CommandError(
            f"{name} must return a {what} and a tuple of its arguments, such as ({what}, (params, "
            f"batch)), ({what}, (params,)) if there is one; got a {type(made[1]).__name__} "
            "instead of the tuple."
        )
    return made


def _kind(made: object) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(part).__name__ for part in made)})"
    return f"a {type(made).__name__}"


def _module(name: str) -> types.ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = pathlib.Path(name)
    if not path.is_file():
        raise CommandError(f"there is no file {name!r}. Give its path from this folder.")
    # A script can import its siblings, as when it is run.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        # This cannot happen for a file that ends with .py: every such file has a loader.
        raise CommandError(f"{name!r} cannot be imported as Python. Give a file of Python.")
    module = importlib.util.module_from_spec(spec)
    # Register the module before it runs, as `import` does: dataclasses and pickle look a module up
    # by its name.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
