"""`bisect`: find the parts of a function that must stay in float32, with few trials."""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from halfstep._autocast import Plan, Rule, decided
from halfstep._base import Progress, checked
from halfstep._policy import Operation, Outcome, Policy, PrecisionRule, as_policy, recipes_of
from halfstep._program import Finder
from halfstep.debug._compare.bisection import Bisection, Needed
from halfstep.debug._compare.compare import compare
from halfstep.debug._compare.measure import Measure, Trials

T = TypeVar("T")
# Up to this many items, each is left out in turn: bisection would not take fewer trials if half of
# them are needed.
_FEW = 16


@checked
def bisect(
    func: Callable[..., Any],
    batches: Sequence[Sequence[Any]],
    policy: Policy | str = "f16",
    *,
    tolerance: float = 0.01,
    has_aux: bool = False,
    measure: Measure | None = None,
    refine: bool = True,
    progress: bool = True,
) -> Bisection:
    """Find a smallest set of scopes and operations that must stay wide, and the policy for it.

    Every trial compiles the function with additional rules, runs it on all batches, and measures
    how far it is from float32. The search covers scopes first, then the operations in the scopes
    that were found. Candidates at which `compare` sees the most error are tried first. None of the
    rules that are found can be left out, provided that a wider scope never makes the error worse.

    For a policy with a recipe (`"f8"`), the set contains the products that must stay in the compute
    dtype; all others can stay in 8 bits.

    Args:
        func: A loss, whose value and gradients are measured; or any other function of parameters,
            such as a whole step in float32, whose results are measured.
        batches: The arguments of each call: `[(params, batch), ...]`.
        policy: A policy that is too narrow, such as `"f16,op:*=compute"`, where everything runs in
            float16.
        tolerance: The largest error that is good enough: of the loss and of all gradients together,
            relative to float32, in each batch.
        has_aux: Whether a loss returns something else as well.
        measure: A function of a policy that returns its error, to be used instead. It may train for
            a while.
        refine: Whether to search among the operations of the scopes that were found.
        progress: Whether to show a bar, if tqdm is installed.

    Returns:
        A `debug.Bisection`: what is needed, and the policy. `save` writes it into a file that
        `Policy.load` reads.

    Raises:
        ValueError: If the tolerance cannot be met with any set.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def loss(w, x):
            with jax.named_scope("hidden"):
                hidden = jnp.tanh(x @ w)
            with jax.named_scope("spread"):
                spread = jnp.mean((1000 * hidden) ** 2) / 1e4
            with jax.named_scope("out"):
                return jnp.log(spread)


        batch = jnp.eye(4), jnp.linspace(-1, 1, 8).reshape(2, 4)
        found = halfstep.debug.bisect(loss, [batch], "f16,op:*=compute", progress=False)
        assert {rule.scope for rule in found.rules} == {"spread"}
        assert found.before == float("inf") and found.error < 0.01
        ```
    """
    policy = as_policy(policy)
    if not len(batches):
        raise ValueError(
            f"`batches`: bisect needs at least one batch: [(params, batch), ...]; got {batches!r}."
        )
    if not isinstance(batches[0], tuple | list):
        raise TypeError(
            "`batches` is a list of the arguments of each call: [(params, batch), ...]; its first "
            f"entry is a {type(batches[0]).__name__}. Put the arguments of one call into a list: "
            "[(params, batch)]."
        )
    try:
        inspect.signature(func).bind(*batches[0])
    except TypeError as error:
        raise TypeError(
            f"`batches` must have what the function is called with, each as a tuple; got one of "
            f"{len(batches[0])}: {error}. Write [(params, batch), ...]."
        ) from error
    recipes = recipes_of(policy.recipe, policy.rules)
    outcome: Outcome = "compute" if recipes else "float32"
    trials = Trials(func, batches, has_aux=has_aux, measure=measure)
    operations = [one for one in _lowered(trials.plan(policy)) if _concerned(one, policy)]
    with Progress(None, show=progress) as bar:

        def is_enough(rules: tuple[PrecisionRule, ...]) -> bool:
            bar.begin(f"{len(rules)} of {len(units)} rules")
            before = trials.compiles
            enough = trials.error(_with(policy, rules, outcome)) <= tolerance
            for _ in range(trials.compiles - before):
                bar.done()
            return enough

        units: Sequence[PrecisionRule] = ()
        before = trials.error(policy)
        found: tuple[PrecisionRule, ...] = ()
        units = _by_scope(operations, outcome)
        count = len(units)
        if before > tolerance:
            if not is_enough(tuple(units)):
                least = trials.error(_with(policy, units, outcome))
                got = "not finite" if math.isinf(least) else f"{least:.2g}"
                raise ValueError(
                    f"required an error of at most {tolerance:g}; with all candidates in "
                    f"higher precision it is {got}. Allow a larger tolerance, or look at the "
                    "function in float32: `debug.first_nonfinite` says where it is not finite."
                )
            # One more program tells where error is added. The search needs the fewest trials if the
            # rules that are needed come first.
            added = []
            # For a recipe with state, `compare` would need that state, so the order stays as it is.
            if not any(recipe.needs_state for recipe in recipes):
                added = _added(func, batches[0], policy)
                trials.compiles += 1
            units = _promising(units, added)
            found = smallest(units, is_enough)
            # Scopes come first because there are far fewer of them than operations. Rules for their
            # single operations may not be enough, since a scope also covers operations that only
            # follow their operands. In that case the scopes stay.
            finer = _inside(found, operations)
            if refine and finer != found and is_enough(finer):
                units = _promising(finer, added)
                found = smallest(units, is_enough)
        error = trials.error(_with(policy, found, outcome))
    return Bisection(
        trials.without_idle_rules(policy.replace(rules=(*found, *policy.rules))),
        tuple(Needed(rule, _lines(rule, operations)) for rule in found),
        tolerance,
        before,
        error,
        len(operations),
        sum(any(rule.matches(one.operation) for rule in found) for one in operations),
        count,
        trials.compiles,
    )


@dataclasses.dataclass(frozen=True)
class _Lowered:
    """An operation that a policy runs in low precision."""

    name: str
    scope: str
    line: str
    in_recipe: bool

    @property
    def operation(self) -> Operation:
        """The operation as rules see it."""
        return Operation(self.name, self.scope, {}, (), ())


def _lowered(plan: Plan) -> list[_Lowered]:
    """Find the operations that run in the compute dtype, except those that only move values."""
    finder, found = Finder(), []
    for owner, index in decided(plan):
        node, decision = owner.graph.nodes[index], owner.decisions[index]
        # An operation that follows its operands becomes wide when they do.
        low = decision.dtype == owner.settings.compute and decision.rule is not Rule.FOLLOW
        if decision.inner is None and (low or decision.site is not None):
            line = finder.find(node.source.traceback).short
            scope = "/".join(part for part in node.scope.split("/") if part)
            found.append(_Lowered(node.name, scope, line, decision.site is not None))
    return found


def _by_scope(operations: Sequence[_Lowered], outcome: Outcome) -> tuple[PrecisionRule, ...]:
    """Make a rule for each scope, innermost first, and for each operation outside all scopes."""
    scopes = {operation.scope for operation in operations if operation.scope}
    ordered = sorted(scopes, key=lambda scope: -scope.count("/"))
    outside = dict.fromkeys(operation.name for operation in operations if not operation.scope)
    if any(operation.in_recipe for operation in operations):
        # A recipe's products are single operations, so their rules are for single operations.
        return _by_operation(operations, outcome)
    rules = [PrecisionRule(outcome, scope=_pattern(scope)) for scope in ordered]
    return _different([*rules, *(PrecisionRule(outcome, op=_pattern(name)) for name in outside)])


def _by_operation(operations: Sequence[_Lowered], outcome: Outcome) -> tuple[PrecisionRule, ...]:
    """Make a rule for each operation in each scope."""
    pairs = dict.fromkeys((operation.scope, operation.name) for operation in operations)
    ordered = sorted(pairs, key=lambda pair: -len(pair[0].split("/")) if pair[0] else 0)
    return _different(
        PrecisionRule(outcome, op=_pattern(name), scope=_pattern(scope) if scope else None)
        for scope, name in ordered
    )


def _inside(
    rules: Sequence[PrecisionRule], operations: Sequence[_Lowered]
) -> tuple[PrecisionRule, ...]:
    """Make rules for the single operations that other rules match."""
    made: list[PrecisionRule] = []
    for rule in rules:
        concerned = [one for one in operations if rule.matches(one.operation)]
        made += [rule] if rule.op else _by_operation(concerned, rule.outcome)  # pyright: ignore[reportArgumentType]
    return _different(made)


def _lines(rule: PrecisionRule, operations: Sequence[_Lowered]) -> tuple[str, ...]:
    """Return the lines of the user's code that a rule matches."""
    found = dict.fromkeys(one.line for one in operations if rule.matches(one.operation))
    return tuple(found)


def _pattern(name: str) -> str:
    # A rule cannot contain the characters that separate the parts of a policy's text. The pattern
    # `?` matches any one character.
    return re.sub(r"[,=@:\s]", "?", name)


def _different(
    rules: Iterator[PrecisionRule] | Sequence[PrecisionRule],
) -> tuple[PrecisionRule, ...]:
    return tuple(dict.fromkeys(rules))


def _concerned(one: _Lowered, policy: Policy) -> bool:
    return one.in_recipe or not recipes_of(policy.recipe, policy.rules)


def _with(policy: Policy, rules: Sequence[PrecisionRule], outcome: Outcome) -> Policy:
    """Return the policy plus these rules, merged so that redundant rules are allowed."""
    if not rules:
        return policy

    def concerned(operation: Operation) -> bool:
        return any(rule.matches(operation) for rule in rules)

    return policy.replace(rules=(PrecisionRule(outcome, where=concerned), *policy.rules))


def _added(
    func: Callable[..., Any], args: Sequence[Any], policy: Policy
) -> list[tuple[Operation, float]]:
    """Return the operations that add error, and how much."""
    report = compare(func, policy, sites="ops", gradients=False)(*args)
    return [(Operation(s.site.op, s.site.scope, {}, (), ()), s.added) for s in report.worst]


def _promising(
    units: Sequence[PrecisionRule], added: Sequence[tuple[Operation, float]]
) -> tuple[PrecisionRule, ...]:
    """Sort rules by the error that is added where they match, most first."""

    def promise(rule: PrecisionRule) -> float:
        return max((error for one, error in added if rule.matches(one)), default=0.0)

    # Rules of equal promise stay in their order: the innermost scopes first.
    return tuple(sorted(units, key=lambda rule: -promise(rule)))


def smallest(items: Sequence[T], is_enough: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """Find a subset that is enough, and from which nothing can be left out.

    This holds if more is never worse: every superset of a set that is enough is also enough. The
    last member of the shortest prefix of the list that is enough must be in the set, so bisection
    finds one member after the other. For `m` members of `n` items this takes about `m * log2(n)`
    trials, and fewer if the members come early in the list.

    Args:
        items: The candidates. All of them together are enough.
        is_enough: Whether some of the candidates are enough.
    """
    if len(items) <= _FEW:
        return _without_needless(items, is_enough)
    found: tuple[T, ...] = ()
    pool = tuple(items)
    # Given the members found so far, the shortest prefix of the pool that is enough ends with
    # another member: without it the prefix would not be enough. Everything after it is not needed.
    while not is_enough(found):
        count = _shortest(pool, found, is_enough)
        found, pool = (*found, pool[count - 1]), pool[: count - 1]
    # In the order of the list.
    return tuple(item for item in items if item in found)


def _without_needless(
    items: Sequence[T], is_enough: Callable[[tuple[T, ...]], bool]
) -> tuple[T, ...]:
    if is_enough(()):
        return ()
    # The least promising first: if two rules can replace each other, the more promising one stays.
    kept = tuple(items)
    for item in reversed(items):
        rest = tuple(other for other in kept if other != item)
        if rest and is_enough(rest):
            kept = rest
    return kept


def _shortest(
    pool: Sequence[T], found: tuple[T, ...], is_enough: Callable[[tuple[T, ...]], bool]
) -> int:
    """Return the length of the shortest prefix of a pool that is enough together with `found`.

    The empty prefix is known not to be enough.
    """
    low, high, guess = 0, len(pool), 1
    # Items are sorted by promise, so short prefixes are tried first.
    while guess < len(pool) and guess <= _FEW:
        if is_enough((*found, *pool[:guess])):
            high = guess
            break
        low, guess = guess, 4 * guess
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough((*found, *pool[:middle])):
            high = middle
        else:
            low = middle
    return high
