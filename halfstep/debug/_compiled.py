"""Functions that are compiled for a look at their numbers, and forgotten."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from halfstep._base import is_array


class Compiled:
    """A function that is compiled such that every operation is rounded as it is written.

    Where XLA may keep more bits than a dtype has, as on CPUs, what overflows elsewhere does not
    overflow there. The program goes when this object goes: a search compiles hundreds, and
    Equinox's `filter_jit` keeps all that it ever compiled.
    """

    def __init__(self, func: Callable[..., Any]):
        self._func = func
        self._static: Any = None
        self._run: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The arrays of what the function returns."""
        arrays, static = eqx.partition((args, kwargs), is_array)
        if self._run is None or not eqx.tree_equal(static, self._static):
            func = self._func

            def run(arrays: Any) -> Any:
                args, kwargs = eqx.combine(arrays, static)
                return eqx.filter(func(*args, **kwargs), eqx.is_array)

            options: Any = {"xla_allow_excess_precision": False}
            self._static, self._run = static, jax.jit(run, compiler_options=options)
        return self._run(arrays)
