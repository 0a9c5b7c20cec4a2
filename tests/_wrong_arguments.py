"""Calls of public functions that work, and the same with one argument that is wrong.

The calls are those of the docstrings' examples: each example is run, and what it hands to the
functions that check their arguments is kept.
"""

import contextlib
import dataclasses
import decimal
import fractions
import inspect
import pathlib
import re
import sys
import traceback
import types
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

import halfstep
from halfstep import debug, optim, quant, reliability
from halfstep._preflight import steps
from halfstep.integrations import nnx, orbax
from tests.test_snippets import blocks, run

MODULES = {
    "halfstep": halfstep,
    "debug": debug,
    "optim": optim,
    "quant": quant,
    "reliability": reliability,
    "nnx": nnx,
    "orbax": orbax,
}
# These take seconds where they accept what they are given, or their examples do.
SLOW = ("F8Scaling", "SiteState", "bisect", "Bisection", "Needed", "plan", "Plan", "preflight")
# A folder that is written to is another one afterwards; and rules are matched with every operation
# of a trace, too often for a check.
LEFT_OUT = ("Checkpoints.save", "Checkpoints.restore", ".matches")
FEW = ("None", "a fraction", "a text", "a mapping", "an array of JAX")
_INTEGRATIONS = ("nnx", "orbax")
_OF_SHAPES = r"[Ii]ncompatible shapes|cannot reshape array of shape"
_FILES = ("directory", "path", "before", "notes")
_READ = ("text", "path", "before")
# A caller's mistake, or a mean one. What is right for a parameter is accepted, and says nothing.
WRONG: Mapping[str, Any] = types.MappingProxyType(
    {
        "None": None,
        "a negative number": -1,
        "zero": 0,
        "a fraction": 0.37,
        "not a number": float("nan"),
        "infinity": float("inf"),
        "a huge number": 2**70,
        "a text": "zz",
        "no text": "",
        "bytes": b"zz",
        "a list": [],
        "a list of None": [None],
        "a tuple of texts": ("zz", "y"),
        "a mapping": {},
        "a mapping of one": {"zz": 1},
        "an object": object(),
        "a class": int,
        "a module": types,
        "an empty array": np.ones(0, np.float32),
        "an array of JAX": jnp.ones((2, 3)),
        "an array of texts": np.asarray(["zz"]),
        "a complex number": 1j,
        "a set": {1},
        "an exception": ValueError("zz"),
        "True": True,
        "a very huge number": 10**400,
        "a tiny number": 5e-324,
        "NumPy's integer": np.int64(-3),
        "NumPy's nan": np.float32("nan"),
        "a fraction of integers": fractions.Fraction(1, 3),
        "a decimal": decimal.Decimal("0.1"),
        "a frozen set": frozenset({"zz"}),
        "a range": range(3),
        "an iterator": iter(()),
        "a nested list": [[["zz"]]],
        "a list of numbers": [1, -2],
        "a tuple of mappings": ({},),
        "a mapping of None": {None: None},
        "a path": pathlib.Path("zz"),
        "a slice": slice(1),
        "an ellipsis": ...,
        "a dtype of integers": np.dtype("int32"),
        "a dtype of texts": np.dtype("U3"),
        "a shape": jax.ShapeDtypeStruct((2,), jnp.float32),
        "an array of integers": np.arange(3),
        "an array of objects": np.asarray([None, {}], object),
        "a large text": "z" * 100_000,
        "a text of other letters": "\x00\ud800é",
        "a generator": (one for one in ()),
        "a weak number": np.bool_(False),
        "a list of arrays": [np.ones(2), np.ones(3)],
        "an array of no axes": np.asarray(3),
    }
)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that works.

    Attributes:
        name: Of the function.
        func: What is called.
        signature: Of it.
        given: Its arguments, by parameter.
        folder: Where the example is.
    """

    name: str
    func: Callable[..., Any]
    signature: inspect.Signature
    given: Mapping[str, Any]
    folder: pathlib.Path

    def with_argument(self, name: str, value: Any) -> Any:
        """What the call returns with another argument."""
        bound = inspect.BoundArguments(self.signature, {**self.given, name: value})
        return self.func(*bound.args, **bound.kwargs)

    @property
    def parameters(self) -> list[str]:
        """The parameters that take one value."""
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        found = self.signature.parameters.items()
        return [name for name, one in found if one.kind not in several and name != "self"]


def public_functions() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """All public functions and methods, with their docstrings."""
    for module_name, module in MODULES.items():
        # Not `vars`: the names of the package are imported when they are first used.
        for name, thing in inspect.getmembers(module):
            # What an integration imports for itself is not public.
            is_imported = getattr(thing, "__module__", None) != module.__name__
            if name.startswith("_") or (is_imported and module_name in _INTEGRATIONS):
                continue
            where = f"{module_name}.{name}"
            kind = thing if inspect.isclass(thing) else type(thing)
            if inspect.isfunction(thing):
                yield where, thing, inspect.getdoc(thing) or ""
            elif kind.__module__.startswith("halfstep"):
                for method, own in vars(kind).items():
                    own = getattr(own, "__func__", own)
                    is_public = method in ("__init__", "__call__") or method[0] != "_"
                    if inspect.isfunction(own) and is_public:
                        said = f"{inspect.getdoc(kind)}\n\n{inspect.getdoc(own)}"
                        yield f"{where}.{method}", own, said


def harvested(folder: pathlib.Path, left_out: Sequence[str]) -> list[Call]:
    """One call of each function, as the examples have it.

    Args:
        folder: Where examples are written.
        left_out: Parts of the names of functions that are not asked for.
    """
    asked = [one for one in public_functions() if not any(part in one[0] for part in left_out)]
    functions = {inspect.unwrap(func).__code__: (name, func) for name, func, _ in asked}
    found: dict[str, Call] = {}

    def watch(frame: types.FrameType, event: str, _: object) -> None:
        if event != "call" or frame.f_code not in functions:
            return
        name, func = functions[frame.f_code]
        signature = inspect.signature(func)
        given = {key: frame.f_locals[key] for key in signature.parameters}
        if name.endswith(".__init__"):
            # An object that is there cannot be made again, and as a tree it has no leaves yet.
            func = type(given.pop("self"))
            rest = [one for key, one in signature.parameters.items() if key != "self"]
            signature = signature.replace(parameters=rest)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given)):
            # Of a trace that is over by the time it would be used.
            return
        found.setdefault(name, Call(name, func, signature, given, folder))

    examples = {tuple(blocks(said)): name for name, _, said in asked}
    for example, name in examples.items():
        sys.setprofile(watch)
        try:
            run(list(example), name, folder)
        finally:
            sys.setprofile(None)
    return list(found.values())


class Accepted(Exception):
    """What was handed in is taken, and the work would begin."""


def accept(*_: object, **__: object) -> None:
    """In place of what takes long."""
    raise Accepted


def complaint(call: Call, name: str, value: Any) -> str | None:
    """What is wrong with the answer to a wrong argument; `None` if nothing is.

    Either the call works, or halfstep itself refuses it, by an error that names the parameter.
    """
    try:
        with contextlib.redirect_stdout(None):
            call.with_argument(name, value)
    except Accepted:
        return None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any(pathlib.Path(frame.filename).parent == call.folder for frame in frames):
            # A function of the example itself was given what it cannot work on.
            return None
        where = pathlib.Path(frames[-1].filename)
        is_own = "halfstep" in where.parts and "site-packages" not in where.parts
        text = f"{type(error).__name__}: {str(error)[:150]}"
        is_shape = call.name.startswith("quant.") and re.search(_OF_SHAPES, text)
        is_path = name in _FILES and isinstance(error, OSError | UnicodeError)
        if "groups.axis" in text or is_shape or is_path:
            # Groups and scales that were made for another array, of which JAX says both shapes; and
            # what a file system says of its names.
            return None
        if not is_own:
            return f"raised in {where.name}: {text}"
        # `raise` is what refuses; another statement that fails is an accident.
        if not (frames[-1].line or "").startswith("raise"):
            return f"by accident in {where.name}:{frames[-1].lineno}: {text}"
        # A text that is read, and a file, are told by what they are.
        is_told = name in _READ and any(said in str(error) for said in (str(value), repr(value)))
        # Of several targets, the one that is wrong is named: `target`.
        called = "targets?" if name == "targets" else name
        if not (is_told or re.search(rf"\b{called}\b", str(error))):
            return f"does not name `{name}`: {text}"
    return None


# What is not wrong by itself: a state of what JAX has no arrays for may be another's business.
_BOTH = (
    ("halfstep.transaction", "state", "an array of texts"),
    ("halfstep.transaction", "state", "an array of objects"),
)


def asked(calls: Sequence[Call], objects: Sequence[str]) -> Iterator[tuple[Call, list[str | None]]]:
    """Each call, and what is wrong with its answers to some objects."""
    given = {name: WRONG[name] for name in objects}
    for call in calls:
        # Whatever the compiler is asked to compile has been accepted.
        with unittest.mock.patch.object(steps, "compile_program", accept):
            found = list(complaints([call], given))
        yield call, found


def complaints(calls: list[Call], wrong: Mapping[str, Any]) -> Iterator[str | None]:
    """Of every call with every wrong argument."""
    for call in calls:
        for name in call.parameters:
            said = str(call.signature.parameters[name].annotation)
            is_function = callable(call.given[name]) or "Callable" in said
            for what, value in wrong.items():
                # Of a function of another kind, what it raises is its own.
                is_other = is_function and callable(value)
                if is_other or (call.name, name, what) in _BOTH:
                    continue
                found = complaint(call, name, value)
                yield found and f"{call.name}({name}={what}): {found}"
