"""Import the names of a package when they are first used."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def attach(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, ...], Callable[[], list[str]], Callable[[str], Any]]:
    """Return `__all__`, `__dir__` and `__getattr__` of a package (PEP 562).

    Args:
        package: The name of the package.
        homes: The names that each module defines; those of the package itself are modules.
    """
    home_of = {name: home for home, names in homes.items() for name in names}
    names = tuple(sorted(home_of))

    def attributes() -> list[str]:
        hidden = [name for name in vars(sys.modules[package]) if name.startswith("_")]
        return sorted({*names, *hidden})

    def attribute(name: str) -> Any:
        if name not in home_of:
            module = sys.modules[package]
            # With name and object, Python adds the nearest name: "Did you mean ...?"
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; "
                f"write dir({package}) to see what it has",
                name=name,
                obj=module,
            )
        value = _imported(package, home_of[name], name)
        # From here on, Python finds the name by itself.
        setattr(sys.modules[package], name, value)
        return value

    return names, attributes, attribute


def _imported(package: str, home: str, name: str) -> Any:
    import jax

    # The first use may be inside a function that is being traced. An array that a module makes when
    # it is imported, one of a dependency's, would be a tracer there, and useless afterwards.
    with jax.ensure_compile_time_eval():
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(home), name)


def prepare_jax() -> None:
    """Import the part of halfstep that changes JAX's configuration, except for the command.

    `halfstep._base` makes a context of JAX's, and imports `jax.extend`, which makes others. Each is
    part of the key under which JAX caches compiled functions. If it came later, at the first use of
    a name, JAX would compile again all functions that were compiled before; and twice the one in
    which the name is first used.
    """
    if not _is_command():
        importlib.import_module("halfstep._base")


def _is_command() -> bool:
    """Return whether this process is the `halfstep` command, which imports JAX if it needs it."""
    # A program that embeds Python may have no arguments.
    program = (getattr(sys, "argv", None) or [""])[0]
    if program == "-m":
        # Python is about to run `python -m NAME`, and has not replaced this word yet.
        return sys.orig_argv[sys.orig_argv.index("-m") :][1:2] == ["halfstep"]
    return os.path.basename(program).removesuffix(".exe") == "halfstep"
