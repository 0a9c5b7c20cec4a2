"""Calls from a step back into Python, which do not travel to a compiler in another process."""

from typing import Any

from jax.extend import core

from halfstep._preflight._errors import PreflightError
from halfstep._program import equations

_CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})


def refuse_callbacks(jaxpr: core.Jaxpr, platform: str) -> None:
    """Raise for the first callback, with the line of the user's that made it."""
    for equation in equations(jaxpr):
        if equation.primitive.name in _CALLBACKS:
            raise PreflightError(
                f"the step calls back into Python ({equation.primitive.name}{_line(equation)}), "
                f"which cannot be compiled for {platform} in another process. Take "
                "jax.debug.print, io_callback and the like out of the step for this; for "
                "Equinox's error_if set the environment variable EQX_ON_ERROR=off."
            )


def _line(equation: Any) -> str:
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if "site-packages" not in frame.file_name:
            return f" at {frame.file_name}:{frame.line_num}"
    return ""
