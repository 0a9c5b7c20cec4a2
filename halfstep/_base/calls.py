"""Represent a call: its arguments as named leaves, and the call as a function of its arrays."""

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.tree_util as jtu

from halfstep._base.trees import (
    MarkedLeaf,
    is_array,
    marked_leaves,
    match_rules,
    set_variable,
    variables_in,
)

_T = TypeVar("_T")
_W = TypeVar("_W", bound=int | str)


def argument_names(func: Callable[..., Any], count: int) -> tuple[str, ...]:
    """Name `count` positional arguments: by the function's names, `args/0` for variadic ones."""
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


def listed(which: _W | Sequence[_W]) -> tuple[_W, ...]:
    """Return a tuple of arguments, given as one or several positions or names."""
    # A name is also a sequence of letters, so it is checked first.
    if isinstance(which, str):
        return cast("tuple[_W, ...]", (which,))
    try:
        # Also NumPy's integers.
        return cast("tuple[_W, ...]", (operator.index(cast("int", which)),))
    except TypeError:
        return tuple(cast("Sequence[_W]", which))


class Arguments:
    """One call's arguments, flattened to leaves whose paths begin with the parameter's name.

    The `leaves` can be replaced, and `rebuild` puts them back into the structure of the call.
    """

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.names = (*argument_names(func, len(args)), *kwargs)
        self.leaves: list[MarkedLeaf] = []
        self.owners: list[int] = []
        """For each leaf, the number of the argument that it is in."""
        values = (*args, *kwargs.values())
        # One by one and not all at once: key paths of `(args, kwargs)` would begin with numbers,
        # and the rules that users write in `keep=` begin with the names of their own parameters.
        for number, (name, value) in enumerate(zip(self.names, values, strict=True)):
            below = marked_leaves(value, root=name)
            self.leaves += below
            self.owners += [number] * len(below)
        self._structure = jtu.tree_structure((tuple(args), tuple(kwargs.values())))
        self._keywords = tuple(kwargs)

    def select(self, rules: Sequence[str], *, option: str = "keep") -> list[bool]:
        """Return which leaves the rules select; a rule that selects nothing is an error."""
        paths = [leaf.path for leaf in self.leaves]
        return match_rules(rules, paths, roots=self.names, option=option)

    def rebuild(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's `args` and `kwargs` with other leaves in place."""
        args, values = jtu.tree_unflatten(self._structure, leaves)
        return args, dict(zip(self._keywords, values, strict=True))


class FlatCall:
    """A call that takes and returns lists of arrays, so that it can be traced."""

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]):
        self.arguments = Arguments(func, args, kwargs)
        self._func = func
        self._leaves = [leaf for _, leaf, _ in self.arguments.leaves]
        # A Python number is not an array here. It stays part of the function, as a literal of the
        # traced program, which yields to other dtypes; as an argument it would be an array.
        self.is_dynamic = [
            is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self._leaves
        ]
        """For each leaf of the arguments, whether it is one of the arrays."""
        self.arrays = self.dynamic(self._leaves)
        self.paths = tuple(self.dynamic([leaf.path for leaf in self.arguments.leaves]))
        """The path of each array in the call, beginning with the parameter's name."""
        self.owners = tuple(self.dynamic(self.arguments.owners))
        """The number of the argument that each array belongs to."""
        self._results: tuple[Any, list[Any], list[bool]] | None = None
        self._variables = variables_in((args, kwargs))
        self._changed: list[int] = []

    def dynamic(self, of_leaves: Sequence[_T]) -> list[_T]:
        """Select the items that belong to arrays, given one item for each leaf."""
        return [x for x, dynamic in zip(of_leaves, self.is_dynamic, strict=True) if dynamic]

    def given(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's `args` and `kwargs` with other arrays in place."""
        return self.arguments.rebuild(_merged(self._leaves, self.is_dynamic, arrays))

    def __call__(self, *arrays: Any) -> list[Any]:
        """Return the results' arrays, and those of variables that the function changed in place."""
        args, kwargs = self.given(arrays)
        variables = variables_in((args, kwargs))
        before = [variable.get_raw_value() for variable in variables]
        results, treedef = jtu.tree_flatten(self._func(*args, **kwargs))
        after = [variable.get_raw_value() for variable in variables]
        # The object's identity shows whether it was changed: traced values cannot be compared.
        self._changed = [
            at for at, pair in enumerate(zip(before, after, strict=True)) if pair[0] is not pair[1]
        ]
        self._check_variables(variables_in((args, kwargs)))
        # A traced function returns arrays only. All other results of the user's function (strings,
        # None, functions) are known now, and `rebuild` puts them back.
        is_traced: list[bool] = [is_array(result) for result in results]
        others = [None if traced else x for x, traced in zip(results, is_traced, strict=True)]
        self._results = (treedef, others, is_traced)
        found = [x for x, traced in zip(results, is_traced, strict=True) if traced]
        return [*found, *(after[at] for at in self._changed)]

    def _check_variables(self, now: Sequence[Any]) -> None:
        if len(now) != len(self._variables):
            raise ValueError(
                "the function gives an NNX module of its arguments other variables than it had "
                f"({len(self._variables)} before, {len(now)} after; `sow` and the first call of a "
                "cache do this), and these would be lost. Use "
                "halfstep.integrations.nnx.value_and_grad, or call the module once before."
            )

    def rebuild(self, arrays: Sequence[Any]) -> Any:
        """Return what the function returns, made from the results' arrays, once it was traced.

        This also changes the variables of NNX modules that the function changed, as a call without
        the rewriting does.
        """
        if self._results is None:
            # Every caller traces first.
            raise RuntimeError(f"{self._func!r} was not traced")
        treedef, others, is_traced = self._results
        count = len(arrays) - len(self._changed)
        for at, value in zip(self._changed, arrays[count:], strict=True):
            set_variable(self._variables[at], value)
        arrays = arrays[:count]
        return jtu.tree_unflatten(treedef, _merged(others, is_traced, arrays))


def _merged(leaves: Sequence[Any], replaced: Sequence[bool], by: Sequence[Any]) -> list[Any]:
    given = iter(by)
    return [next(given) if new else leaf for leaf, new in zip(leaves, replaced, strict=True)]
