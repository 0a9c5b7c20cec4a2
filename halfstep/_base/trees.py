"""Handle trees: paths as strings, rules that select leaves, kinds of leaves, persistent state."""

import difflib
import functools
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


def path_string(path: Sequence[Any], *, root: str = "") -> str:
    """Return a key path as a string, `layers/0/weight`, below an optional root such as `params`."""
    below = jtu.keystr(tuple(path), simple=True, separator="/")
    return "/".join(part for part in (root, below) if part)


def compile_rule(rule: object) -> re.Pattern[str]:
    """Compile a path rule.

    Components are separated by `/`; `*` and `?` match within one component, `**` any number of
    components. A rule selects a leaf if it matches the leaf's path or any node above it, so
    `"state"` selects everything below `state`.
    """
    if not isinstance(rule, str) or not rule or rule.startswith("/") or rule.endswith("/"):
        raise ValueError(
            "a path rule is a text such as 'state', 'batch/targets' or '**/running_var'; "
            f"got {rule!r}."
        )
    if "," in rule:
        # The comma separates the parts of a policy's text; `?` stands for any one character.
        raise ValueError(
            f"a path rule cannot contain a comma; got {rule!r}. Write '?' in its place."
        )
    return _pattern(rule)


# Cached, because it is called for every operation of a function and every rule.
@functools.lru_cache(maxsize=4096)
def _pattern(rule: str) -> re.Pattern[str]:
    parts: list[str] = []
    for component in rule.split("/"):
        if component == "**":
            parts.append("(?:[^/]+/)*")
        else:
            text = re.escape(component).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
            parts.append(f"{text}/")
    return re.compile("".join(parts))


def match_rules(
    rules: Sequence[str], paths: Sequence[str], *, roots: Iterable[str] = (), option: str = "keep"
) -> list[bool]:
    """Return which of `paths` are selected by any of `rules`.

    Args:
        rules: Path rules, see `compile_rule`.
        paths: One path per leaf.
        roots: Names that a rule may select although nothing lies below them: an argument that is
            `None` is not a mistake.
        option: The name under which the user gave the rules, for the error.

    Raises:
        ValueError: If a rule selects nothing; the message names the nearest candidates.
    """
    selected = [False] * len(paths)
    # With a slash at the end, so that `head` does not select `header`.
    known_roots = [f"{root}/" for root in roots]
    slashed = [f"{path}/" for path in paths]
    for rule in rules:
        pattern = compile_rule(rule)
        hits = [index for index, path in enumerate(slashed) if pattern.match(path)]
        for index in hits:
            selected[index] = True
        if not hits and not any(pattern.match(root) for root in known_roots):
            raise ValueError(_unmatched(rule, paths, [root[:-1] for root in known_roots], option))
    return selected


def _unmatched(rule: str, paths: Sequence[str], roots: Sequence[str], option: str) -> str:
    candidates = dict.fromkeys(roots)
    for path in paths:
        parts = path.split("/")
        candidates.update(dict.fromkeys("/".join(parts[: n + 1]) for n in range(len(parts))))
    last = rule.rsplit("/", 1)[-1]
    by_name = [
        path
        for path in candidates
        if difflib.SequenceMatcher(None, path.rsplit("/", 1)[-1], last).ratio() >= 0.7
    ]
    # Compare the whole path, and the last name alone: often only the place of the leaf is wrong.
    near = difflib.get_close_matches(rule, list(candidates), n=3, cutoff=0.5)
    shown = list(dict.fromkeys([*near, *by_name]))[:3] or list(candidates)[:5]
    listed = ", ".join(repr(path) for path in shown) or "none: there are no leaves"
    return (
        f"the rule {rule!r} in `{option}` selects nothing among {len(paths)} leaves. "
        f"Nearest candidates: {listed}. Components are separated by '/', '**' stands for any "
        "number of them. Use one of these, or leave the rule out."
    )


@runtime_checkable
class Shaped(Protocol):
    """An array, or a stand-in for one: a `jax.ShapeDtypeStruct`, the type of a traced value."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def is_array(leaf: object) -> TypeGuard[jax.Array | np.ndarray | np.generic]:
    """Return whether a leaf is a JAX or NumPy array or scalar."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_inexact(leaf: object) -> bool:
    """Return whether a leaf holds floating-point or complex numbers, Python's own included."""
    if isinstance(leaf, float | complex):
        return True
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_key(leaf: object) -> bool:
    """Return whether a leaf holds typed PRNG keys."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def without_key_type(leaf: Any) -> Any:
    """Return the integers of typed PRNG keys, and other leaves as they are."""
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


STATE_NAMES = ("batch_stats", "mean_ema", "var_ema", "running_mean", "running_var")
"""Path components that mark state: Linen's collection, Haiku's averages, PyTorch's buffers."""

_STATE_NAME = re.compile(rf"(?:^|/)(?:{'|'.join(STATE_NAMES)})(?:/|$)")


class MarkedLeaf(NamedTuple):
    """A leaf, its path as a string, and whether it is persistent state."""

    path: str
    leaf: Any
    is_state: bool


def is_state_node(node: object) -> bool:
    """Return whether a node of a tree is persistent state by its type."""
    # Equinox's states and NNX's variables exist only once their user has imported Equinox or Flax,
    # which halfstep never does here.
    equinox, nnx = sys.modules.get("equinox"), sys.modules.get("flax.nnx")
    if equinox is not None and isinstance(node, equinox.nn.State):
        return True
    return nnx is not None and isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param)


def variables_in(tree: object) -> list[Any]:
    """Return the variables of NNX modules in a tree, which functions change in place."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    nodes = jtu.tree_leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [node for node in nodes if isinstance(node, nnx.Variable)]


def set_variable(variable: Any, value: object) -> None:
    """Change a variable of an NNX module in place.

    Raises:
        ValueError: If the variable belongs outside the gradient function that is being traced.
    """
    # Flax lets a variable be changed only at the level of tracing where it was made: a tracer of an
    # inner level in a variable of an outer one would outlive its trace.
    try:
        variable.set_raw_value(value)
    except sys.modules["flax"].errors.TraceContextError as error:
        raise ValueError(
            f"the function changes a {type(variable).__name__} of an NNX module in place, and its "
            "new value cannot leave the gradient function. Use "
            "halfstep.integrations.nnx.value_and_grad, which takes modules in all arguments."
        ) from error


def marked_leaves(tree: object, *, root: str = "") -> list[MarkedLeaf]:
    """Return the leaves of `tree` in JAX's order, each with its path and whether it is state."""
    marked: list[MarkedLeaf] = []
    for path, node in jtu.tree_flatten_with_path(tree, is_leaf=is_state_node)[0]:
        by_type = is_state_node(node)
        # A state node is taken whole first: its leaves alone do not show that they are state.
        below = jtu.tree_flatten_with_path(node)[0] if by_type else [((), node)]
        for sub_path, leaf in below:
            text = path_string((*path, *sub_path), root=root)
            marked.append(MarkedLeaf(text, leaf, by_type or bool(_STATE_NAME.search(text))))
    return marked
