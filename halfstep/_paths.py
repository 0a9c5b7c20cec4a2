"""Tree paths as text, and the rules that select leaves by them."""

import difflib
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax.tree_util as jtu


def path_string(path: Sequence[Any], *, root: str = "") -> str:
    """A key path as text, `layers/0/weight`, below an optional root such as an argument's name."""
    below = jtu.keystr(tuple(path), simple=True, separator="/")
    return "/".join(part for part in (root, below) if part)


def compile_rule(rule: Any) -> re.Pattern[str]:
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


# Asked for every operation of a function and every rule.
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
    """Which of `paths` are selected by any of `rules`.

    Args:
        rules: Path rules, see `compile_rule`.
        paths: One path a leaf.
        roots: Names that a rule may select although nothing lies below them: an argument that is
            `None` is no mistake.
        option: The name under which the user gave the rules, for the error.

    Raises:
        ValueError: If a rule selects nothing; the message names the nearest candidates.
    """
    selected = [False] * len(paths)
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
    near = difflib.get_close_matches(rule, list(candidates), n=3, cutoff=0.5)
    shown = list(dict.fromkeys([*near, *by_name]))[:3] or list(candidates)[:5]
    listed = ", ".join(repr(path) for path in shown) or "none: there are no leaves"
    return (
        f"the rule {rule!r} in `{option}` selects nothing among {len(paths)} leaves. "
        f"Nearest candidates: {listed}. Components are separated by '/', '**' stands for any "
        "number of them. Use one of these, or leave the rule out."
    )
