"""Define the user's rules for the precision of single operations, which override the table."""

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal as OneOf, TypeGuard, get_args

import jax

from halfstep._base import check_fields, checked, compile_rule
from halfstep._policy.recipe import RECIPES, Recipe, RecipeName, as_recipe

Outcome = OneOf[
    "compute", "float32", "widest", "follow", "as_traced", "accumulate", "state", "activation"
]
OUTCOMES: tuple[str, ...] = get_args(Outcome)
READINGS = ("state", "activation")
"""The outcomes that are about the carries of a loop."""
PrecisionFunction = Callable[..., Any]
"""`(compute_dtype, original_dtypes, *operands, **params) -> (operands, params)`."""

# JAX writes the names of transformations around a scope: `transpose(jvp(head))`.
_TRANSFORMS = re.compile(r"\b(?:jvp|vmap|transpose|jit|pjit|rematted_computation|checkpoint)\(")


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of a traced function, as a rule's `where` sees it.

    Attributes:
        primitive: The name of JAX's primitive, `"dot_general"`.
        scope: The `jax.named_scope`s that it is in, outermost first: `"decoder/head"`.
        params: The parameters of the primitive.
        ins: Shapes and dtypes of the operands, as the function was written.
        outs: Shapes and dtypes of the results.
        function: The name of the function that a loop runs in each iteration; empty for others.

    Example:
        ```python
        import halfstep


        def large(operation):
            return operation.primitive == "dot_general" and operation.outs[0].size > 2**20


        rule = halfstep.PrecisionRule("float32", where=large)
        assert halfstep.Policy(compute="bf16", rules=(rule,)).rules == (rule,)
        ```
    """

    primitive: str
    scope: str
    params: Mapping[str, Any]
    ins: tuple[jax.ShapeDtypeStruct, ...]
    outs: tuple[jax.ShapeDtypeStruct, ...]
    function: str = ""


@dataclasses.dataclass(frozen=True)
class PrecisionRule:
    """The precision in which some operations run. The first matching rule of a policy wins.

    Attributes:
        outcome: `"compute"` (operands and result in the compute dtype), `"float32"` (in float32,
            contractions and whole loops included), `"widest"`, `"follow"` or `"as_traced"` (as in
            the table of operations), `"accumulate"` (a contraction of operands in the compute dtype
            whose result stays float32; other operations are not affected), a recipe or its name
            (`"mxfp8"`: products of weights are computed with this recipe and not with the policy's;
            other operations are not affected), `"state"` or `"activation"` (loops only: whether
            their carries stay float32, or follow what the body makes of them), or a function
            `(compute_dtype, original_dtypes, *operands, **params) -> (operands, params)` that
            returns the operands and parameters to run the operation with.
        op: Which primitives, by name; `*` and `?` may be used. `None` means all.
        scope: Which `jax.named_scope`s, in the grammar of path rules: `"decoder/head"` and all
            below it, `"**/attention"`. `None` means all.
        where: A function of an `Operation` that returns whether the rule applies to it.
        loop: Which loops, by the name of the function that they run in each iteration; `*` and `?`
            may be used. `None` means all operations, loops or not.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def scores(params, x):
            with jax.named_scope("head"):
                return x @ params


        rule = halfstep.PrecisionRule("float32", scope="head")
        assert rule == halfstep.PrecisionRule.parse("scope:head=float32")
        policy = halfstep.Policy(compute="bf16", rules=(rule,))
        x, params = jnp.full((1, 8), 1 / 3), jnp.full((8, 1), 1 / 3)
        assert halfstep.autocast(scores, policy)(params, x) == scores(params, x)
        assert halfstep.autocast(scores, "bf16")(params, x) != scores(params, x)
        ```
    """

    outcome: Outcome | RecipeName | Recipe | PrecisionFunction
    op: str | None = None
    scope: str | None = None
    where: Callable[[Operation], bool] | None = None
    loop: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        _check_outcome(self.outcome)
        if isinstance(self.outcome, Recipe) and RECIPES.get(self.outcome.name) == self.outcome:
            # One form for each rule, so that a rule that is read back compares equal.
            object.__setattr__(self, "outcome", self.outcome.name)
        if self.op is self.scope is self.where is self.loop is None:
            raise ValueError(
                f"a rule says what it is for; got {self.outcome!r} alone. Give op=, scope=, loop= "
                "or where=."
            )
        if self.op is not None and (self.loop is not None or self.is_reading):
            raise ValueError(
                f"a rule for loops has no op=; got op={self.op!r} with "
                f"{'outcome ' + repr(self.outcome) if self.loop is None else f'loop={self.loop!r}'}"
                ". Name the loop by its function, loop='step', or by its scope."
            )
        check_place(self.op, self.scope)
        check_place(self.loop, None)

    @staticmethod
    @checked
    def parse(text: str) -> "PrecisionRule":
        """Read `"op:tanh=compute"`, `"op:dot_general@head=accumulate"` or `"loop:step=state"`.

        Raises:
            ValueError: If the text is not a rule.
        """
        found = re.fullmatch(
            r"(?:(?P<kind>op|loop):(?P<name>[^@=]+)(?:@(?P<inside>[^=]+))?|scope:(?P<scope>[^=]+))"
            r"=(?P<outcome>.+)",
            text.strip(),
        )
        if not found:
            raise ValueError(
                "a rule is a text such as 'op:tanh=compute', 'scope:decoder/head=float32', "
                "'loop:step=state' or 'op:dot_general@decoder/head=accumulate'; got "
                f"{text!r}."
            )
        outcome: Any = _check_outcome(found["outcome"].strip())
        scope = found["scope"] or found["inside"]
        if found["kind"] == "loop":
            return PrecisionRule(outcome, scope=scope, loop=found["name"])
        return PrecisionRule(outcome, op=found["name"], scope=scope)

    def __str__(self) -> str:
        place = f"op:{self.op or '*'}" if self.loop is None else f"loop:{self.loop}"
        if self.scope is not None:
            is_alone = self.op is self.loop is None
            place = f"scope:{self.scope}" if is_alone else f"{place}@{self.scope}"
        if self.where is not None:
            place += f" where {_name(self.where)}"
        return f"{place}={_told(self.outcome)}"

    @property
    def is_text(self) -> bool:
        """Whether the rule can be written as text: it holds no function and no own recipe."""
        return self.where is None and isinstance(self.outcome, str)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that the rule gives to products, if it gives one."""
        return as_recipe(self.outcome) if _is_recipe(self.outcome) else None

    @property
    def is_reading(self) -> bool:
        """Whether the rule says how the carries of loops are read."""
        return self.outcome in READINGS

    def matches(self, operation: Operation) -> bool:
        """Return whether the rule applies to an operation."""
        if self.loop is not None and not (
            operation.function and fnmatch.fnmatchcase(operation.function, self.loop)
        ):
            return False
        if not is_at(operation, self.op, self.scope):
            return False
        return self.where is None or bool(self.where(operation))


def check_place(op: str | None, scope: str | None) -> None:
    """Raise unless a rule's pattern of operations and its path of scopes can be written as text."""
    if "" in (op, scope):
        raise ValueError(
            f"`op` and `scope` of a rule cannot be empty; got op={op!r}, scope={scope!r}. Leave "
            "out what does not matter."
        )
    if scope is not None:
        compile_rule(scope)
    for text in (op, scope):
        if text is not None and re.search(r"[,=@:]", text):
            raise ValueError(
                f"{text!r} in a rule cannot contain a comma or one of '=@:'; write '?' in "
                "their place."
            )


def is_at(operation: Operation, op: str | None, scope: str | None) -> bool:
    """Return whether an operation matches a rule's name and scope; `None` matches any."""
    # Not `fnmatch`, which ignores upper and lower case on Windows.
    if op is not None and not fnmatch.fnmatchcase(operation.primitive, op):
        return False
    # With a slash at the end, so that `head` does not match `header`.
    return scope is None or bool(compile_rule(scope).match(f"{operation.scope}/"))


def _check_outcome(outcome: object) -> Any:
    if not callable(outcome) and outcome not in OUTCOMES and not _is_recipe(outcome):
        raise ValueError(
            f"a rule's outcome is one of {', '.join(OUTCOMES)}, a recipe such as 'f8' or 'mxfp8', "
            f"or a function; got {outcome!r}."
        )
    return outcome


def _is_recipe(outcome: object) -> TypeGuard[Recipe | RecipeName]:
    return isinstance(outcome, Recipe) or (isinstance(outcome, str) and outcome in RECIPES)


def _told(outcome: object) -> str:
    if isinstance(outcome, Recipe):
        return outcome.name
    return outcome if isinstance(outcome, str) else _name(outcome)


def recipes_of(recipe: Recipe | None, rules: Sequence[PrecisionRule]) -> tuple[Recipe, ...]:
    """Return the recipes of a policy: its own first, then those that its rules give."""
    found = [recipe, *(rule.recipe for rule in rules)]
    return tuple(dict.fromkeys(one for one in found if one is not None))


def _name(function: object) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def plain_scope(scope: str) -> str:
    """Return a scope without the names of transformations around it."""
    if "(" not in scope:
        return scope
    return _TRANSFORMS.sub("", scope).replace(")", "")
