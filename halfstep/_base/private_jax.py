"""The one file that touches what JAX does not promise to keep. Without it, less is known.

`tests/test_private_jax.py` looks at what it relies on, with every JAX that is tested.
"""

import contextlib
import os
import sys
from collections.abc import Generator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jax.extend import source_info_util

OWN_FILE = __file__
"""Frames of this file are not the user's."""
_JAX = os.path.join(os.path.dirname(jax.__file__), "")
_BACKWARD = "backward_pass"


@runtime_checkable
class TracebackFrame(Protocol):
    """A frame of JAX's tracebacks."""

    @property
    def file_name(self) -> str: ...
    @property
    def function_name(self) -> str: ...
    @property
    def line_num(self) -> int: ...


@runtime_checkable
class Traceback(Protocol):
    """A traceback as JAX keeps it of each operation; its class has no public name."""

    @property
    def frames(self) -> Sequence[TracebackFrame]:
        """The innermost first."""
        ...


@contextlib.contextmanager
def lines_of_backward_functions() -> Generator[None, None, None]:
    """Keep the lines of what is traced in backward functions (of `custom_vjp`) as they are.

    JAX writes the line of the call over them, whose derivative they are. If it has changed how it
    does that, it is that line as before.
    """
    module: Any = sys.modules[source_info_util.current.__module__]
    try:
        before, traceback = module.current, module.xla_client.Traceback.get_traceback
    except AttributeError:
        yield
        return

    def current() -> Any:
        kept, own = before(), traceback()
        return kept.replace(traceback=own) if _is_in_backward_function(own) else kept

    module.current = current
    try:
        yield
    finally:
        module.current = before


def _is_in_backward_function(traceback: Traceback) -> bool:
    """Whether a frame that is not JAX's is inside its backward pass."""
    inside = outside = False
    for frame in traceback.frames:
        is_jax = frame.file_name.startswith(_JAX)
        if is_jax and _BACKWARD in frame.function_name:
            return outside
        # The innermost frames are ours, up to where JAX asks for the line.
        inside |= is_jax
        outside |= inside and not is_jax
    return False


_COMPILER = os.path.join("jax", "_src", "compiler.py")


def is_compiling(thread: int) -> bool:
    """Whether a thread is compiling a program at this moment, by its stack.

    JAX tells of a compile when it is done, and of none that runs. Should the file have another name
    one day, the answer is no.
    """
    # By its name: Python documents it, and says by the underscore that it is for such uses only.
    frames: dict[int, Any] = getattr(sys, "_current_frames")()  # noqa: B009
    frame = frames.get(thread)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            return True
        frame = frame.f_back
    return False
