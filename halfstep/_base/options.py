"""Answer a call that a function's signature refuses: by the option's name, with what to type.

Users of JAX, Equinox, PyTorch and other libraries for mixed precision know other names for the same
things, and things that belong elsewhere. Python only says that a keyword is unexpected.
"""

import difflib
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_DONATE = "Donation belongs to the step that is compiled: jax.jit(step, donate_argnums=...)."
_STATIC = "Leave it out: arguments that are not arrays are static by themselves."
_POLICY = "The policy says in which dtypes to compute: policy='bf16', policy='f16' or a Policy."
_SCALING = "The loss scaling is an object: scaling=halfstep.DynamicLossScaling()."

# By the name of an option: what to type instead, and the parameter that only those functions have
# to which the answer applies. The first row that applies is used.
_ANSWERS: Mapping[str, Sequence[tuple[str, str]]] = types.MappingProxyType(
    {
        "argnums": (
            (
                "has_aux",
                "It differentiates with respect to the first argument: pass everything that is "
                "trained in one tree, for example as a tuple.",
            ),
            ("params", "Which arguments hold parameters is said by `params=`."),
        ),
        "allow_int": (
            ("has_aux", "Leave it out: arrays of integers in the first argument are left alone."),
        ),
        "static_argnums": (("", _STATIC),),
        "static_argnames": (("", _STATIC),),
        "donate": (("", _DONATE),),
        "donate_argnums": (("", _DONATE),),
        "donate_argnames": (("", _DONATE),),
        "has_aux": (
            (
                "func",
                "Leave it out: the new function returns what the function returns. has_aux=True "
                "belongs to filter_grad and filter_value_and_grad.",
            ),
        ),
        "dtype": (("policy", _POLICY),),
        "compute_dtype": (("policy", _POLICY),),
        "half_dtype": (("policy", _POLICY),),
        "enabled": (("policy", "To compute as the function is written, pass policy='f32'."),),
        "islands": (
            (
                "policy",
                "A rule of the policy says what is stored for the backward pass: "
                "policy='bf16,store:op:*=keep' stores what JAX stores by itself.",
            ),
        ),
        "loss_scale": (("scaling", _SCALING),),
        "loss_scaling": (("scaling", _SCALING),),
        "scaler": (("scaling", _SCALING),),
        "use_mixed_precision": (("policy", "To compute in float32, pass policy='f32'."),),
    }
)


def call_name(owner: Any) -> str:
    """Return the name by which users call a function, a class or an object that is called."""
    name = owner.__qualname__.removesuffix(".__init__")
    # The only public object that is called is `preflight`, whose class is `Preflight`.
    return name.removesuffix(".__call__").lower() if name.endswith(".__call__") else name


def what_it_is(owner: Any, name: str) -> str:
    """Return the first sentence that the docstring has on a parameter."""
    # Parameters of `__init__` may be described in the docstring of the class, too.
    place = getattr(sys.modules.get(owner.__module__), owner.__qualname__.split(".")[0], None)
    text = f"{inspect.getdoc(owner)}\n\n{inspect.getdoc(place)}"
    # Up to the next parameter, which is not indented deeper, or up to an empty line.
    said = re.search(rf"^( +){name}: ((?:.|\n(?!\1\w+: |\n))+)", text, re.MULTILINE)
    if said is None:
        return ""
    sentence = " ".join(said[2].split()).split(". ")[0].removesuffix(".")
    return f" `{name}`: {sentence}."


class CallForm:
    """The arguments that a function takes, by position and by name.

    Attributes:
        by_place: The names of those that may be given by position.
    """

    def __init__(self, owner: Callable[..., Any]):
        self._owner = owner
        parameters = inspect.signature(owner).parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        named = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.by_place = [one.name for one in parameters if one.kind in placed]
        self._by_name = [one.name for one in parameters if one.kind in named]
        self._required = [
            one.name
            for one in parameters
            if one.kind in (*placed, *named) and one.default is one.empty
        ]
        self._any_place = inspect.Parameter.VAR_POSITIONAL in kinds
        self._any_name = inspect.Parameter.VAR_KEYWORD in kinds

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise unless the function takes these arguments."""
        if not self._any_name:
            check_options(self._owner, kwargs, self._by_name)
        if len(args) > len(self.by_place) and not self._any_place:
            others = [name for name in self._by_name if name not in self.by_place]
            raise TypeError(_too_many(self._owner, self.by_place, others, args))
        given = {*self.by_place[: len(args)], *kwargs}
        for name in self._required:
            if name not in given:
                said = what_it_is(self._owner, name)
                raise TypeError(f"`{call_name(self._owner)}` also needs `{name}`: pass it.{said}")


def _too_many(owner: Any, names: Sequence[str], others: Sequence[str], args: Sequence[Any]) -> str:
    """Return the message for too many arguments by position.

    Args:
        owner: The function that was called.
        names: The names of what it takes by position.
        others: The names of what it takes by name only.
        args: What it was given.
    """
    name, own = call_name(owner), names[:1] == ["self"]
    # A method's own object is not an argument that the user has written.
    names, args = names[own:], args[own:]
    quoted = [f"`{one}`" for one in names]
    taken = f"{', '.join(quoted[:-1])} and {quoted[-1]}" if quoted[1:] else "".join(quoted)
    func, theirs = _call_of(args[0]) if callable(args[0]) else ("func", "...")
    fix = f"Pass others by name: {', '.join(others)}." if others else "Leave the others out."
    if typing.get_origin(typing.get_type_hints(owner).get("return")) is _CALLABLE:
        fix = f"It returns a function: write {name}({func}, ...)({theirs})."
    elif "args" in names:
        fix = f"Pass the arguments of `{func}` as one tuple: {name}({func}, ({theirs}), ...)."
    return f"`{name}` takes {taken or 'nothing'} by position; got {len(args)} arguments. {fix}"


_CALLABLE = typing.get_origin(Callable[..., Any])


def parameters_of(func: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return a function's parameters; `None` for built-in callables without a signature."""
    try:
        return inspect.signature(func).parameters
    except (TypeError, ValueError):
        return None


def _call_of(func: Callable[..., Any]) -> tuple[str, str]:
    """Return a function's name, and the names of its parameters as they stand in a call."""
    name = getattr(func, "__name__", "func")
    name = name if name.isidentifier() else "func"
    return name, ", ".join(parameters_of(func) or ()) or "..."


def check_options(owner: Any, given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise if an option is given that a function does not have.

    Args:
        owner: The function, for its name.
        given: The options, with their values.
        known: The names of the options that the function has.
    """
    for name, value in given.items():
        if name in known:
            continue
        hints = [hint for only, hint in _ANSWERS.get(name, ()) if not only or only in known]
        # A hint that was written for this option says more than a similar name.
        hints += [f"Did you mean `{near}`?" for near in difflib.get_close_matches(name, known, 1)]
        hint = f" {hints[0]}" if hints else ""
        options = ", ".join(one for one in known if one not in ("self", "func"))
        raise TypeError(
            f"`{call_name(owner)}` has no option {name!r}; got {repr(value)[:60]}.{hint} "
            f"Choose from {options}."
        )


def option_names(owner: Callable[..., Any]) -> list[str]:
    """Return the names of a transform's options: all its parameters but the function."""
    return list(inspect.signature(owner).parameters)[1:]


def refusing(
    owner: Any, options: Collection[str], func: Callable[..., Any], made: Callable[_P, _R]
) -> Callable[_P, _R]:
    """Return the function that a transform made, with an answer to misplaced options.

    Args:
        owner: The transform.
        options: The names of its options. They do not belong into a call of the new function,
            unless the user's function has a parameter of that name.
        func: The user's function.
        made: The function that the transform made of it.
    """

    @functools.wraps(func)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if kwargs:
            _check_names(owner, options, func, kwargs)
        return made(*args, **kwargs)

    return call


def _check_names(
    owner: Any, options: Collection[str], func: Callable[..., Any], given: Mapping[str, Any]
) -> None:
    parameters = parameters_of(func)
    if parameters is None or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for name, value in given.items():
        if name in parameters:
            continue
        if name in options:
            transform, (mine, _) = call_name(owner), _call_of(func)
            shown = repr(value)
            if len(shown) > 40 or "\n" in shown:
                shown = f"{type(value).__name__}(...)"
            raise TypeError(
                f"`{name}` is an option of `{transform}`, and `{mine}` has no such parameter: "
                f"write {transform}({mine}, {name}={shown})(...)."
            )
        if name in _ANSWERS:
            check_options(owner, {name: value}, options)
