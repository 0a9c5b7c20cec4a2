"""What a planted fault is."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Fault:
    """A function that goes wrong, and where.

    Attributes:
        name: As it is marked in the source.
        make: Makes the function and its arguments.
        stage: The pass in which it begins.
        ops: Operations any of which is right; empty if any is.
        framework: Which the function is written in.
        turns: The turn of each loop around it.
        shard: The shard on which it begins.
        path: The argument that is bad, if one is.
        devices: How many it needs.
    """

    name: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    stage: str
    ops: tuple[str, ...] = ()
    framework: str = "JAX"
    turns: tuple[int, ...] = ()
    shard: int | None = None
    path: str = ""
    devices: int = 1

    @property
    def file(self) -> str:
        """The name of the file that it is in."""
        return os.path.basename(inspect.getsourcefile(self.make) or "")

    @property
    def line(self) -> int:
        """The line that is marked; 0 if an argument is bad."""
        module = inspect.getmodule(self.make)
        if module is None or self.path:
            return 0
        lines = inspect.getsource(module).splitlines()
        (found,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"# fault: {self.name}")]
        return found
