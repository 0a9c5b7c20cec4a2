"""Check the arguments of public functions against their annotations.

A wrong argument should be reported where it is passed, and not fail minutes later inside JAX, Optax
or Equinox, under another name. Signatures already say what each parameter takes, and docstrings say
what it is for: the error combines both. The functions themselves check what annotations do not say
(a number that must be positive, two trees that must match).

Only values that are certainly wrong are refused. Protocols, type variables and `Any` take
everything, a sequence may be an array, and whatever can be read as an integer or a number is
accepted as such.
"""

import collections.abc
import functools
import inspect
import operator
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import AbstractArray

from halfstep._base.display import type_of
from halfstep._base.formats import parse_dtype
from halfstep._base.options import CallForm, call_name, what_it_is
from halfstep._base.trees import Shaped, is_key

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Expected(NamedTuple):
    """The values that a parameter takes.

    Attributes:
        text: The words for the message, such as `a Ledger`.
        refusal: Returns `None` for a value that fits, and otherwise the reason why it does not, or
            an empty string if there is nothing more to say.
    """

    text: str
    refusal: Callable[[Any], str | None]


def checked_but(*names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Check the arguments of a function, except those for which it has its own, better errors."""

    def decorate(func: Callable[_P, _R]) -> Callable[_P, _R]:
        return _checked(func, names)

    return decorate


def checked(func: Callable[_P, _R]) -> Callable[_P, _R]:
    """Check the arguments of a function when it is called.

    Args:
        func: A public function, or the `__init__` of a public class.
    """
    return _checked(func, ())


def _checked(func: Callable[_P, _R], but: Sequence[str]) -> Callable[_P, _R]:
    form = CallForm(func)

    @functools.wraps(func)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # Read here and not when the module is imported: annotations may name types that are
        # imported later.
        known = _expectations(func)
        form.check(args, kwargs)
        # Nothing is known about the arguments after these, in `*args`.
        for name, value in (*zip(form.by_place, args, strict=False), *kwargs.items()):
            if name in known and name not in but:
                _check(func, name, known[name], value)
        return func(*args, **kwargs)

    return call


def check_fields(instance: Any) -> None:
    """Check the fields of a dataclass, for its `__post_init__`."""
    kind = type(instance)
    for name, found in _expectations(kind).items():
        _check(kind, name, found, getattr(instance, name))


@functools.cache
def _expectations(owner: Any) -> dict[str, _Expected]:
    hints = typing.get_type_hints(owner)
    kinds = inspect.signature(owner).parameters
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    made: dict[str, _Expected] = {}
    for name, parameter in kinds.items():
        if parameter.kind in several or name not in hints:
            continue
        found = _expected(hints[name])
        if found is not None:
            # A default may stand for a value that is decided later, and is not in the annotation.
            made[name] = _either(found.text, [_one(found.text, parameter.default), found])
    return made


def _kind(text: str, accepts: Callable[[Any], bool]) -> _Expected:
    return _Expected(text, lambda value: None if accepts(value) else "")


def _one(text: str, only: Any) -> _Expected:
    return _kind(text, lambda value: value is only)


def _either(text: str, members: Sequence[_Expected]) -> _Expected:
    def refusal(value: Any) -> str | None:
        said = [member.refusal(value) for member in members]
        # The longest reason says the most.
        return None if None in said else max((one or "" for one in said), key=len)

    return _Expected(text, refusal)


def _expected(annotation: Any) -> _Expected | None:
    """Return what an annotation takes; `None` if it takes everything."""
    if annotation is Any:
        return None
    if annotation in (None, type(None)):
        return _one("None", None)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        # Only the type is checked here: a function that takes one of several names reports an
        # unknown name itself, and says what each name is for.
        kinds = tuple({type(one) for one in args})
        allowed = ", ".join(map(repr, args))
        return _kind(f"one of {allowed}", lambda value: isinstance(value, kinds))
    if origin in (collections.abc.Sequence, collections.abc.Collection):
        return _sequence(args[0], arrays=True)
    if args[1:] == (...,):
        return _sequence(args[0], arrays=False)
    if origin is tuple:
        return _tuple(args)
    if origin is collections.abc.Mapping:
        return _mapping(args[1])
    if origin is collections.abc.Callable:
        return _kind("a function", callable)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    kind = origin or annotation
    if not isinstance(kind, type) or kind is object or getattr(kind, "_is_protocol", False):
        return None
    if issubclass(kind, AbstractArray):
        # `Shaped` takes any dtype, and has no list of dtypes.
        is_keys = isinstance(kind.dtypes, Sequence) and "prng_key" in kind.dtypes
        return _kind("a key, such as jax.random.key(0)", _is_key) if is_keys else _ARRAY
    # An annotation names a class of Optax's only in a module that has imported Optax.
    optax = sys.modules.get("optax")
    if optax is not None and issubclass(kind, optax.GradientTransformation):
        return _kind("an optimizer of Optax's (with `init` and `update`)", _is_optimizer)
    article = "an" if kind.__name__[0] in "AEIOU" else "a"
    return _kind(f"{article} {kind.__name__}", lambda value: isinstance(value, kind))


def _union(annotations: Sequence[Any]) -> _Expected | None:
    of_dtype = typing.get_args(DTypeLike)
    members: list[_Expected | None] = []
    if set(of_dtype) <= set(annotations):
        members.append(_DTYPE)
        annotations = [one for one in annotations if one not in of_dtype]
    parsers = [one.parse for one in annotations if hasattr(one, "parse")]
    for one in annotations:
        # A policy may be given as a string, which must be the text of a policy.
        is_parsed = one is str and parsers
        members.append(_Expected("a text", _parsed(parsers[0])) if is_parsed else _expected(one))
    known = [member for member in members if member is not None]
    if len(known) < len(members):
        return None
    # `None` last: "a Policy, a text or None".
    known.sort(key=lambda member: member.text == "None")
    texts = list(dict.fromkeys(member.text for member in known))
    text = texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
    return _either(text, known)


def _parsed(parse: Callable[[str], Any]) -> Callable[[Any], str | None]:
    def refusal(value: Any) -> str | None:
        if not isinstance(value, str):
            return ""
        try:
            parse(value)
        except (TypeError, ValueError) as error:
            return str(error)
        return None

    return refusal


def _sequence(annotation: Any, *, arrays: bool) -> _Expected:
    inner = _expected(annotation)

    def refusal(value: Any) -> str | None:
        if arrays and isinstance(value, np.ndarray | jax.Array) and value.ndim == 1:
            value = value.tolist()
        if not isinstance(value, collections.abc.Sequence):
            return ""
        if inner is None:
            return None
        # A single string in place of a sequence of strings passes: the function itself has a
        # better error for it.
        refusals = map(inner.refusal, [value] if isinstance(value, str) else value)
        return next((one for one in refusals if one is not None), None)

    return _Expected("a sequence" if inner is None else f"a sequence, each {inner.text}", refusal)


def _tuple(annotations: Sequence[Any]) -> _Expected:
    members = [_expected(one) for one in annotations]

    def accepts(value: Any) -> bool:
        if not isinstance(value, tuple) or len(value) != len(members):
            return False
        pairs = zip(members, value, strict=True)
        return all(member is None or member.refusal(one) is None for member, one in pairs)

    texts = ["anything" if member is None else member.text for member in members]
    return _kind(f"a tuple of {' and '.join(texts)}", accepts)


def _mapping(annotation: Any) -> _Expected:
    inner = _expected(annotation)

    def accepts(value: Any) -> bool:
        if not isinstance(value, collections.abc.Mapping):
            return False
        return inner is None or all(inner.refusal(one) is None for one in value.values())

    return _kind("a mapping" if inner is None else f"a mapping to {inner.text}", accepts)


def _refused_dtype(value: Any) -> str | None:
    try:
        parse_dtype(value)
    except ValueError as error:
        # An annotation does not say whether a function takes formats of 8 bits.
        return None if _is_small_format(value) else str(error)
    return None if value is not None else "required a dtype or its name, got None."


def _is_small_format(value: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(value), jnp.floating))
    except (TypeError, ValueError):
        return False


def _is_integer(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    # A string can be read as a number, but is not one; a traced number is known later.
    if isinstance(value, str | bytes | type) or getattr(value, "ndim", 0):
        return False
    return isinstance(value, jax.Array) or hasattr(value, "__float__") or _is_integer(value)


def _is_array(value: Any) -> bool:
    if not isinstance(value, Shaped) or isinstance(value, jax.ShapeDtypeStruct):
        return False
    # NumPy has arrays of strings and of objects.
    return getattr(value.dtype, "kind", "f") not in "OSU"


def _is_key(value: Any) -> bool:
    # Keys of the old kind count, too; these are arrays of integers.
    return is_key(value) or (_is_array(value) and value.dtype == np.uint32 and value.ndim > 0)


def _is_optimizer(value: Any) -> bool:
    return callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))


_ARRAY = _kind("an array", _is_array)
_DTYPE = _Expected("a dtype or its name", _refused_dtype)
_PLAIN: Mapping[Any, _Expected] = types.MappingProxyType(
    {
        bool: _kind("True or False", lambda value: isinstance(value, bool | np.bool_)),
        int: _kind("an integer", _is_integer),
        typing.SupportsIndex: _kind("an integer", _is_integer),
        float: _kind("a number", _is_number),
        str: _kind("a text", lambda value: isinstance(value, str)),
        jax.Array: _ARRAY,
    }
)


def _check(owner: Any, name: str, expected: _Expected, value: Any) -> None:
    reason = expected.refusal(value)
    if reason is None:
        return
    called = call_name(owner)
    if reason:
        raise ValueError(f"`{name}` of `{called}` must be {expected.text}: {reason}")
    raise TypeError(
        f"`{name}` of `{called}` must be {expected.text}; got {described(value)}."
        f"{what_it_is(owner, name)}"
    )


def check_share(name: str, value: float | int) -> None:
    """Raise unless a number is a share, from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be a share, from 0 to 1; got {value}. 95 % is 0.95.")


def described(value: object) -> str:
    """Describe a wrong value for an error: arrays by dtype and shape, others by value and type."""
    if isinstance(value, Shaped):
        return type_of(value)
    return f"{repr(value)[:60]} ({type(value).__name__})"
