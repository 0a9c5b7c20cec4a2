"""The arguments of a call as one list of named leaves, so that rules can address them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.tree_util as jtu

from halfstep._paths import match_rules
from halfstep._state import MarkedLeaf, marked_leaves


def argument_names(func: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Names for `count` positional arguments: the function's own, `args/0` for variadic ones."""
    try:
        parameters = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):  # Built-in callables have no signature: number the arguments.
        parameters = []
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}/{n}" for n in range(count - len(names))]
    names += [str(n) for n in range(len(names), count)]
    return tuple(names[:count])


def listed(which: Any) -> tuple[Any, ...]:
    """Arguments that are named one by one, or one alone: by position or name."""
    return (which,) if isinstance(which, int | str) else tuple(which)


class Arguments:
    """One call's arguments, flattened to leaves whose paths begin with the parameter's name.

    `leaves` can be replaced and `rebuild` puts them back into the shape of the call.
    """

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.names = (*argument_names(func, len(args)), *kwargs)
        self.leaves: list[MarkedLeaf] = []
        self.owners: list[int] = []
        """Of each leaf, the number of the argument that it is in."""
        values = (*args, *kwargs.values())
        for number, (name, value) in enumerate(zip(self.names, values, strict=True)):
            below = marked_leaves(value, root=name)
            self.leaves += below
            self.owners += [number] * len(below)
        self._structure = jtu.tree_structure((tuple(args), tuple(kwargs.values())))
        self._keywords = tuple(kwargs)

    def select(self, rules: Sequence[str], *, option: str = "keep") -> list[bool]:
        """Which leaves the rules select; a rule that selects nothing is an error."""
        paths = [leaf.path for leaf in self.leaves]
        return match_rules(rules, paths, roots=self.names, option=option)

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's `args` and `kwargs` with other leaves in place."""
        args, values = jtu.tree_unflatten(self._structure, leaves)
        return args, dict(zip(self._keywords, values, strict=True))
