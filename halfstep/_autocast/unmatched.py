"""A rule that is for nothing in a function is a mistake, and is said to be one."""

import difflib

from halfstep._autocast.types import Plan, decided
from halfstep._policy import PrecisionRule


def check_rules(plan: Plan) -> None:
    """Raise if a rule of the user's has decided nothing in a plan.

    Raises:
        ValueError: With the names that come nearest to what the rule is for.
    """
    rules = plan.settings.rules
    if not rules:
        return
    used, names, scopes = set(), set(), set()
    for owner, index in decided(plan):
        node = owner.graph.nodes[index]
        used.add(owner.decisions[index].by)
        names.add(node.name)
        parts = node.scope.split("/")
        scopes |= {"/".join(parts[: count + 1]) for count in range(len(parts)) if parts[0]}
    for rule in rules:
        if str(rule) not in used:
            raise ValueError(_message(rule, names, scopes))


def _message(rule: PrecisionRule, names: set[str], scopes: set[str]) -> str:
    near = []
    if rule.op is not None and rule.op not in names:
        near.append(f"operations: {_nearest(rule.op, names)}")
    if rule.scope is not None:
        near.append(f"scopes: {_nearest(rule.scope, scopes)}")
    found = "; ".join(near) or f"operations: {_nearest(rule.op or '', names)}"
    return (
        f"the rule {str(rule)!r} is for nothing in this function, or an earlier rule is for all of "
        f"it. Nearest candidates: {found}. An operation is a primitive of JAX: softmax is several, "
        "and halfstep.explain lists all. A scope is one of jax.named_scope's, '/' separates them, "
        "and '**' stands for any number. Use one of these, or leave the rule out."
    )


def _nearest(wanted: str, names: set[str]) -> str:
    last = wanted.rsplit("/", 1)[-1]
    by_end = sorted(name for name in names if name.rsplit("/", 1)[-1] == last)
    near = difflib.get_close_matches(wanted, sorted(names), n=3, cutoff=0.5)
    shown = list(dict.fromkeys([*by_end, *near]))[:3] or sorted(names)[:5]
    return ", ".join(map(repr, shown)) or "none"
