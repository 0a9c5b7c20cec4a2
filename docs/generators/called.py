"""Show objects that are called like functions as functions: an extension of Griffe.

`halfstep.preflight` is an object with a method `__call__`. A reader of its signature wants to see
what is typed, `preflight(step, args, ...)`.
"""

from typing import Any

import griffe

NAMES = {"halfstep._preflight.interface.Preflight.__call__": "preflight"}


class Called(griffe.Extension):
    """Gives the methods in `NAMES` the names by which they are called."""

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Rename one function; the path by which pages ask for it stays."""
        func.name = NAMES.get(func.path, func.name)
