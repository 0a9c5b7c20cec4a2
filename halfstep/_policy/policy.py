"""Define precision policies, and read and write them as text."""

import dataclasses
import json
import os
import pathlib
import re
import tomllib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar, get_args

import jax
import numpy as np

from halfstep._base import DTypeLike, checked, compile_rule, dtype_name, parse_dtype
from halfstep._policy.cast import cast_tree
from halfstep._policy.recipe import RECIPES, Recipe, as_recipe
from halfstep._policy.rules import PrecisionRule, recipes_of
from halfstep._policy.store_rules import StoreRule

T = TypeVar("T")
Mode = Literal["autocast", "inputs"]
Residuals = Literal["e4m3", "e5m2"]
# Fields that are written as lists.
_SEVERAL = ("keep", "rules", "stores")
# Limits of a file: a plan that writes out hundreds of layers has some ten thousand letters.
_LARGEST = 2**18
_DEEPEST = 50
_QUOTED = re.compile(r"\"[^\"\n]*\"|'[^'\n]*'")
"""Strings in quotes, in which dots and brackets do not count."""
_OF_OPERATIONS = ("rules", "accumulate", "recipe", "stores")
"""Fields that apply to single operations."""
# The one-letter keys are jmp's, so that its policies can be pasted.
_KEYS = MappingProxyType(
    {
        "p": "param",
        "params": "param",
        "param": "param",
        "c": "compute",
        "compute": "compute",
        "o": "output",
        "output": "output",
        "accumulate": "accumulate",
    }
)


# Static: a policy in a module or in arguments is not an array, and `jit` compiles for each policy.
@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Policy:
    """Which precision is used where. Immutable and hashable; holds no arrays.

    Attributes:
        param: Dtype in which parameters are stored.
        compute: Dtype of matrix products and convolutions; in the mode `"inputs"`, the dtype in
            which floating-point arguments enter the function.
        output: Dtype of the results, for `cast_to_output`.
        keep: Path rules for arguments to keep in float32, matrix products included; in the mode
            `"inputs"`, for arguments that are not cast.
        rules: Rules for single operations, which override the table of `autocast`:
            `PrecisionRule`s, or strings: `("op:tanh=compute", "scope:decoder/head=float32")`. A
            rule can also give another recipe to some products: `"scope:head=mxfp8"`.
        accumulate: The dtype in which contractions return their results: the compute dtype
            (`None`), or float32 for results that may leave the range of float16.
        recipe: How products of activations and weights are computed in 8 or 4 bits: a `Recipe`, or
            the name of one of `RECIPES`.
        residuals: `"e4m3"` or `"e5m2"` keeps the results of products for the backward pass in 8
            bits, with a scale for each row, and everything else is recomputed from these. The
            forward pass does not change. `None` keeps the residuals in the compute dtype.
        stores: Which results are kept for the backward pass, and how, operation by operation:
            `StoreRule`s, or strings: `("store:op:dot_general=e4m3",)`.
        mode: `"autocast"` decides operation by operation; `"inputs"` casts all arguments and leaves
            the function as it is, as in the MPX paper.

    Example:
        ```python
        from halfstep import Policy

        policy = Policy.parse("bf16")
        assert policy == Policy(param="f32", compute="bf16", output="f32")
        assert str(policy) == "p=f32,c=bf16,o=f32"
        assert Policy.parse(str(policy)) == policy
        assert Policy.parse("bf16:inputs") == policy.replace(mode="inputs")
        careful = Policy(compute="f16", rules=("scope:head=float32",))
        assert str(careful) == "p=f32,c=f16,o=f32,scope:head=float32"
        assert str(Policy.parse("f8")) == "p=f32,c=bf16,o=f32,recipe=f8"
        ```

        In a file, which people can read and edit:

        ```python
        import pathlib, tempfile

        path = pathlib.Path(tempfile.mkdtemp(), "policy.toml")
        careful.save(path, notes=("The head needs it.",))
        assert path.read_text().startswith("# The head needs it.")
        assert Policy.load(path) == careful
        ```
    """

    param: np.dtype
    compute: np.dtype
    output: np.dtype
    keep: tuple[str, ...]
    rules: tuple[PrecisionRule, ...]
    accumulate: np.dtype | None
    recipe: Recipe | None
    residuals: Residuals | None
    stores: tuple[StoreRule, ...]
    mode: Mode

    @checked
    def __init__(
        self,
        *,
        param: DTypeLike = "f32",
        compute: DTypeLike = "bf16",
        output: DTypeLike = "f32",
        keep: Sequence[str] = (),
        rules: Sequence[PrecisionRule | str] = (),
        accumulate: DTypeLike | None = None,
        recipe: Recipe | str | None = None,
        residuals: Residuals | None = None,
        stores: Sequence[StoreRule | str] = (),
        mode: Mode = "autocast",
    ):
        if isinstance(keep, str):
            raise TypeError(f"`keep` is a sequence of path rules; write keep=({keep!r},).")
        if isinstance(rules, str):
            raise TypeError(f"`rules` is a sequence of rules; write rules=({rules!r},).")
        if isinstance(stores, str):
            raise TypeError(f"`stores` is a sequence of rules; write stores=({stores!r},).")
        if mode not in get_args(Mode):
            raise ValueError(f"`mode` is 'autocast' or 'inputs'; got {mode!r}.")
        for rule in keep:
            compile_rule(rule)
        values: dict[str, Any] = {
            "param": parse_dtype(param),
            "compute": parse_dtype(compute),
            "output": parse_dtype(output),
            "keep": tuple(keep),
            "rules": tuple(
                PrecisionRule.parse(rule) if isinstance(rule, str) else rule for rule in rules
            ),
            "accumulate": _accumulator(accumulate, parse_dtype(compute)),
            "recipe": as_recipe(recipe),
            "residuals": residuals,
            "stores": tuple(
                StoreRule.parse(rule) if isinstance(rule, str) else rule for rule in stores
            ),
            "mode": mode,
        }
        if mode == "inputs" and any(values[name] for name in _OF_OPERATIONS):
            raise ValueError(
                "a policy that only casts inputs has no say over single operations; got "
                f"{', '.join(name for name in _OF_OPERATIONS if values[name])} with mode='inputs'. "
                "Leave these out, or use mode='autocast'."
            )
        if values["stores"] and values["compute"].itemsize != 2:
            raise ValueError(
                "`stores` is for autocast to 16 bits; got "
                f"{', '.join(map(str, values['stores']))} with "
                f"compute={dtype_name(values['compute'])!r}. Leave it out, or choose "
                "compute='bf16'."
            )
        recipes = recipes_of(values["recipe"], values["rules"])
        if recipes and values["compute"].itemsize != 2:
            raise ValueError(
                f"the recipe {recipes[0].name!r} is for a compute dtype of 16 bits, in which "
                f"all else runs; got compute={dtype_name(values['compute'])!r}."
            )
        for rule in values["rules"]:
            _check_state(rule, values["recipe"])
        if residuals is not None and residuals not in get_args(Residuals):
            raise ValueError(f"`residuals` is 'e4m3', 'e5m2' or None; got {residuals!r}.")
        if residuals is not None and (values["compute"].itemsize != 2 or mode == "inputs"):
            raise ValueError(
                f"`residuals` is for autocast to 16 bits; got residuals={residuals!r} with "
                f"compute={dtype_name(values['compute'])!r} and mode={mode!r}. Leave it out, or "
                "choose compute='bf16'."
            )
        # `__init__` takes strings and dtypes of any form, which a dataclass would not convert. The
        # fields have one form, so that equal policies compare equal and have the same hash.
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @staticmethod
    @checked
    def parse(text: str) -> "Policy":
        """Read a policy from text.

        Args:
            text: A short name (`"bf16"`, `"f16"`, `"f32"`: parameters and outputs in float32,
                computation in that format; or one of `RECIPES`, such as `"f8"`: products of weights
                in 8 bits, all else as `"bf16"`), or parts separated by commas as in
                `"p=f32,c=bf16,o=f32,keep=state"`. As in jmp, parameters default to float32,
                `c` follows `p` and `o` follows `c`. A short name may be the first part:
                `"f16,op:dot_general@head=accumulate"`. At the end, `":inputs"` means that arguments
                are cast and nothing else.

        Raises:
            ValueError: If the text is not a policy; the message names the wrong part and says what
                to write.
        """
        body, colon, mode = text.partition(":inputs")
        if colon and mode.strip():
            raise ValueError(f"':inputs' ends a policy; got {text!r}.")
        fields: dict[str, Any] = {"mode": "inputs"} if colon else {}
        keep: list[str] = []
        rules: list[str] = []
        stores: list[str] = []
        # No path, scope or rule contains a comma: each is checked where it is made.
        first, *rest = body.split(",")
        if "=" not in first:
            fields |= {"param": "f32", "output": "f32", **_named(first.strip())}
        for part in rest if "=" not in first else [first, *rest]:
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key == "keep" and equals:
                keep.append(value)
            elif key in ("recipe", "residuals") and equals and key not in fields:
                fields[key] = value
            elif key.startswith(("op:", "scope:", "loop:")):
                rules.append(part)
            elif key.startswith("store:"):
                stores.append(part)
            elif equals and key in _KEYS and _KEYS[key] not in fields:
                fields[_KEYS[key]] = parse_dtype(value)
            else:
                problem = "is given twice" if equals and key in _KEYS else "is not known"
                raise ValueError(
                    f"{part.strip()!r} in the policy {text!r} {problem}; write parts such as "
                    "'p=f32' (params), 'c=bf16' (compute), 'o=f32' (output), 'keep=state', "
                    "'op:tanh=compute', 'scope:head=float32', 'accumulate=f32', 'recipe=f8', "
                    "'residuals=e4m3', 'store:op:dot_general=e4m3', 'loop:step=state'."
                )
        fields.setdefault("param", "f32")
        fields.setdefault("compute", fields["param"])
        fields.setdefault("output", fields["compute"])
        return Policy(**fields, keep=keep, rules=rules, stores=stores)

    @staticmethod
    @checked
    def load(path: str | os.PathLike[str]) -> "Policy":
        """Read a policy from a file that `save`, `debug.bisect` or a person has written.

        Args:
            path: A TOML file with the fields of a policy as strings: `compute = "f16"`,
                `rules = ["scope:head=float32"]`. Missing fields are as in `Policy()`.

        Raises:
            ValueError: If the file contains anything that is not part of a policy.
        """
        path = pathlib.Path(path)
        known = [field.name for field in dataclasses.fields(Policy)]
        fields = from_toml(path.read_text(encoding="utf-8"), path.name, known)
        try:
            return Policy(**fields)
        except ValueError as error:
            # The mistake is in the file, so the message begins with its name.
            raise ValueError(f"{path.name}: {error}") from error

    @checked
    def save(self, path: str | os.PathLike[str], *, notes: Sequence[str] = ()) -> None:
        """Write the policy into a file that `load` reads.

        Args:
            path: The file, whose name usually ends with `.toml`.
            notes: Lines of comment at the beginning of the file.

        Raises:
            ValueError: If the policy has rules with functions, or a recipe that is not one of
                `RECIPES`.
        """
        if not self._is_text:
            raise ValueError(
                f"{self} has rules with functions, or a recipe that is not one of RECIPES: these "
                "cannot be written into a file. Keep the policy in Python."
            )
        dtypes = (self.param, self.compute, self.output)
        param, compute, output = map(dtype_name, dtypes)
        fields = {
            "param": param,
            "compute": compute,
            "output": output,
            "keep": self.keep,
            "rules": self.rules,
            "accumulate": None if self.accumulate is None else dtype_name(self.accumulate),
            "recipe": None if self.recipe is None else self.recipe.name,
            "residuals": self.residuals,
            "stores": self.stores,
            "mode": None if self.mode == "autocast" else self.mode,
        }
        pathlib.Path(path).write_text(to_toml(fields, notes), encoding="utf-8")

    @property
    def _is_text(self) -> bool:
        """Whether the text of the policy says all of it."""
        known = self.recipe is None or RECIPES.get(self.recipe.name) == self.recipe
        # A recipe that was changed, and kept its name, would be read back as the original.
        return known and all(rule.is_text for rule in self.rules)

    def __str__(self) -> str:
        parts = [
            f"{key}={dtype_name(dtype)}"
            for key, dtype in (("p", self.param), ("c", self.compute), ("o", self.output))
        ]
        parts += [f"keep={rule}" for rule in self.keep]
        parts += map(str, self.rules)
        if self.accumulate is not None:
            parts.append(f"accumulate={dtype_name(self.accumulate)}")
        if self.recipe is not None:
            parts.append(f"recipe={self.recipe.name}")
        if self.residuals is not None:
            parts.append(f"residuals={self.residuals}")
        parts += map(str, self.stores)
        return ",".join(parts) + (":inputs" if self.mode == "inputs" else "")

    def __repr__(self) -> str:
        return f"Policy.parse({str(self)!r})" if self._is_text else f"Policy({str(self)!r})"

    @property
    def casts_float64(self) -> bool:
        """Whether float64 leaves are cast: only if the policy stores parameters in float64."""
        return self.param == np.dtype(np.float64)

    def cast_to_param(self, tree: T) -> T:
        """Cast a tree to the parameters' dtype."""
        return cast_tree(tree, self.param, float64=self.casts_float64)

    def cast_to_compute(self, tree: T) -> T:
        """Cast a tree to the compute dtype."""
        return cast_tree(tree, self.compute, float64=self.casts_float64)

    def cast_to_output(self, tree: T) -> T:
        """Cast a tree to the output dtype."""
        return cast_tree(tree, self.output, float64=self.casts_float64)

    def replace(self, **changes: Any) -> "Policy":
        """Return the same policy with some fields changed: `policy.replace(keep=("state",))`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        unknown = set(changes) - set(fields)
        if unknown:
            raise TypeError(
                f"a policy has no field {', '.join(sorted(unknown))}; use one of "
                f"{', '.join(fields)}."
            )
        return Policy(**{**fields, **changes})


def _named(name: str) -> dict[str, Any]:
    """Return the fields that a short name stands for."""
    if name in RECIPES:
        return {"compute": "bf16", "recipe": name}
    try:
        return {"compute": parse_dtype(name)}
    except ValueError as error:
        raise ValueError(f"{error} Or name a recipe: {', '.join(map(repr, RECIPES))}.") from None


def _check_state(rule: PrecisionRule, own: Recipe | None) -> None:
    """Raise if a rule's recipe has state that the policy's recipe does not provide."""
    recipe = rule.recipe
    if recipe is None or recipe == own:
        return
    # One scaling holds the state of all products, in the form that the policy's recipe gives it.
    if recipe.history:
        raise ValueError(
            f"the rule {str(rule)!r} gives products delayed scales, whose state only the policy's "
            f"own recipe has. Make {recipe.name!r} the recipe, and name other recipes in rules; or "
            "take a recipe without history."
        )
    if recipe.is_random and own is None:
        raise ValueError(
            f"the rule {str(rule)!r} gives products the random recipe {recipe.name!r}, whose state "
            "belongs to the policy's recipe, and the policy has none. Make it the policy's recipe, "
            f"and keep other products out of it: '{recipe.name},scope:head=compute'."
        )


def _accumulator(dtype: DTypeLike | None, compute: np.dtype) -> np.dtype | None:
    """Return the dtype of contractions' results, or `None` if it is the compute dtype."""
    if dtype is None or parse_dtype(dtype) == compute:
        return None
    if parse_dtype(dtype) != np.dtype(np.float32):
        raise ValueError(f"`accumulate` is float32 or the compute dtype; got {dtype!r}.")
    return parse_dtype(dtype)


def as_policy(policy: object) -> Policy:
    """Return the policy of a text, or the policy itself."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return Policy.parse(policy)
    raise TypeError(
        f"a policy is a Policy or a text such as 'bf16' or 'p=f32,c=bf16,o=f32'; got {policy!r}."
    )


# Policies in TOML files, which people can read and edit.


def to_toml(fields: Mapping[str, Any], notes: Sequence[str] = ()) -> str:
    """Return fields as the text of a file, each as a string or a list of strings.

    Args:
        fields: The fields of the policy; fields that are `None` or empty are left out.
        notes: Lines of comment at the beginning of the file.
    """
    lines = [f"# {line}".rstrip() for note in notes for line in note.splitlines()]
    for name, value in fields.items():
        if name in _SEVERAL and value:
            # A TOML string in quotes is written like a JSON string.
            lines += [f"{name} = [", *(f"  {json.dumps(str(item))}," for item in value), "]"]
        elif value:
            lines.append(f"{name} = {json.dumps(str(value))}")
    return "\n".join(lines) + "\n"


def _why_refused(text: str) -> str | None:
    """Return why a text is not parsed, because the parser would take minutes, or `None`.

    The time of `tomllib` grows with the square of the number of parts of a key, and of the number
    of levels of a list: a stranger's file could keep a job from starting. A policy has neither keys
    of several parts nor nested lists.
    """
    if len(text) > _LARGEST:
        return f"it has {len(text):,} letters, and a policy at most {_LARGEST:,}"
    for number, line in enumerate(_QUOTED.sub("", text).split("\n"), start=1):
        if max(line.count("."), line.count("["), line.count("{")) > _DEEPEST:
            return f"line {number} is nested too deep"
    return None


def from_toml(text: str, name: str, known: Sequence[str]) -> dict[str, Any]:
    """Return the fields that a file contains.

    Args:
        text: The content of the file.
        name: The name of the file, for the error.
        known: The fields that a file may contain.

    Raises:
        ValueError: If the text is not TOML with these fields.
    """
    found: dict[str, Any] = {}
    reason = _why_refused(text)
    if reason is None:
        try:
            found = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            reason = str(error)
    if reason is not None:
        raise ValueError(
            f'{name} is not valid TOML: {reason}. Write lines such as compute = "bf16".'
        )
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(
            f"{name} says {', '.join(map(repr, unknown))}, which no policy has; use "
            f"{', '.join(known)}."
        )
    for field, value in found.items():
        several = field in _SEVERAL
        texts = value if several and isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts) or several != isinstance(value, list):
            form = '["...", "..."]' if several else '"..."'
            raise ValueError(f"{field} in {name} must be written {field} = {form}; got {value!r}.")
    return found
