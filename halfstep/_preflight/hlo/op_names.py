"""Take JAX's names of operations apart: `transpose(jvp(block/attention))/dot_general`."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "backward", "other", "unknown"]
"""The part of a step that an operation is in; `other` is not differentiated, such as the update."""

# The names that JAX writes for its own control flow and calls. They are not named scopes, and a
# named scope with one of these names cannot be told apart from them.
_STRUCTURE = re.compile(
    r"while|body|cond|body_fun|cond_fun|scan|closed_call|core_call|eval_jaxpr|call_exported"
    r"|checkpoint|remat2?|rematted_computation|custom_[jv][vj]p_call(_jaxpr)?|shard_map"
    r"|branch_\d+_fun|pjit"
    # The subscripts of an einsum are a scope of JAX's own.
    r"|.*->.*"
)
_TRANSFORM = re.compile(r"(\w+)\((.*)\)")
_FUNCTIONS = frozenset({"jit", "pjit", "xla_call"})


@dataclass(frozen=True, slots=True)
class OpName:
    """The parts of an operation's name.

    Attributes:
        scope: The `jax.named_scope`s around it, with `/` between them.
        operation: JAX's primitive, such as `dot_general`.
        of: The pass that it is in, by the transformations that JAX wrote around it. An operation
            that does not depend on differentiated values, such as a mask, is `other` in any pass.
    """

    scope: str
    operation: str
    of: Pass


def read(name: str) -> OpName:
    """Take a name apart."""
    parts = list(_parts(name))
    if not parts or parts[-1] == "call_exported":
        # The compiler made this instruction and did not say what for.
        return OpName("", "", "unknown")
    *scopes, operation = parts
    of: Pass = "other"
    if "transpose(" in name:
        of = "backward"
    elif "jvp(" in name:
        of = "forward"
    return OpName(
        "/".join(scope for part in scopes for scope in _scopes(part)),
        (_TRANSFORM.fullmatch(operation) or [operation])[0],
        of,
    )


def _scopes(part: str) -> Iterator[str]:
    """Yield the named scopes in a part of a name."""
    transform = _TRANSFORM.fullmatch(part)
    if transform is None:
        if part and not _STRUCTURE.fullmatch(part):
            yield part
    elif transform[1] not in _FUNCTIONS:
        # A transformation is written around the scopes that it was applied in.
        for inner in _parts(transform[2]):
            yield from _scopes(inner)


def _parts(name: str) -> Iterator[str]:
    """Split at slashes that are not inside parentheses."""
    depth = start = 0
    for at, letter in enumerate(name):
        if letter == "(":
            depth += 1
        elif letter == ")":
            depth -= 1
        elif letter == "/" and depth <= 0:
            yield name[start:at]
            start = at + 1
    if name[start:]:
        yield name[start:]
