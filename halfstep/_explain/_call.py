"""A call as a function of its arrays alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu

from halfstep._base import Arguments, is_array


class Call:
    """A function of the arrays of its arguments; what is no array is part of it."""

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self._func, self._arguments = func, Arguments(func, args, kwargs)
        self._leaves = [leaf for _, leaf, _ in self._arguments.leaves]
        self._given = [
            position
            for position, leaf in enumerate(self._leaves)
            if is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
        ]

    @property
    def values(self) -> list[Any]:
        """The arrays, or their shapes."""
        return [self._leaves[position] for position in self._given]

    @property
    def owners(self) -> list[int]:
        """Which argument each of them is of."""
        return [self._arguments.owners[position] for position in self._given]

    def __call__(self, *values: Any) -> list[Any]:
        """Call the function with other arrays; returns the arrays of its result."""
        filled = list(self._leaves)
        for position, value in zip(self._given, values, strict=True):
            filled[position] = value
        args, kwargs = self._arguments.rebuild(filled)
        return [leaf for leaf in jtu.tree_leaves(self._func(*args, **kwargs)) if is_array(leaf)]
