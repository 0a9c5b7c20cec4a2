"""Define `autocast`, which runs an unmodified float32 function in mixed precision."""

import difflib
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.typing import ArrayLike

from halfstep._autocast.f8.product import Off, Slot
from halfstep._autocast.kinds import Kind
from halfstep._autocast.observing import observe
from halfstep._autocast.plans import FLOAT32, Plan, Settings, decided, placed
from halfstep._autocast.run import Sharing, run
from halfstep._autocast.stored.saves import Saves
from halfstep._autocast.tracing import TracedCall, trace
from halfstep._base import (
    DTypeLike,
    checked_but,
    described,
    dtype_name,
    listed,
    option_names,
    parse_dtype,
    refusing,
)
from halfstep._policy import Policy, PrecisionRule, StoreRule, as_policy, recipes_of
from halfstep._program import Scan, While


@overload
def autocast(
    func: Callable[..., Any],
    policy: Policy | str = "bf16",
    *,
    params: int | str | Sequence[int | str] = 0,
    reduce_dtype: DTypeLike | None = None,
    scaling: Any = None,
) -> Callable[..., Any]: ...


@overload
def autocast(
    func: None = None,
    policy: Policy | str = "bf16",
    *,
    params: int | str | Sequence[int | str] = 0,
    reduce_dtype: DTypeLike | None = None,
    scaling: Any = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


@checked_but("func")
def autocast(
    func: Callable[..., Any] | None = None,
    policy: Policy | str = "bf16",
    *,
    params: int | str | Sequence[int | str] = 0,
    reduce_dtype: DTypeLike | None = None,
    scaling: Any = None,
) -> Callable[..., Any]:
    """Rewrite a function: contractions in the compute dtype, sensitive operations in float32.

    The function is traced as it is written, in float32, and each of its operations runs in the
    precision that suits it. Contractions (dots and convolutions) take their operands in the compute
    dtype. Exponentials, logarithms, powers, divisions and sums run in float32. Everything else runs
    in the widest dtype of its operands, where parameters and constants do not count. Loops,
    branches, calls and functions with their own derivatives are rewritten inside. Results have the
    dtypes that they have without `autocast`.

    The operations that run in float32 between two contractions form an *island*: its inputs and
    outputs are stored in the compute dtype, and its inside is recomputed for the gradient. A norm
    or a softmax in float32 between two contractions therefore stores nothing in float32 for the
    backward pass. Rules of the policy (`"store:op:exp=keep"`) say otherwise of single operations.

    Args:
        func: Any function that can be traced. Without it, a decorator is returned:
            `@halfstep.autocast(policy="bf16")`.
        policy: A `Policy` or its string: its compute dtype, its rules for operations, and the
            arguments that it keeps, whose paths begin with the function's parameter names.
        params: Which arguments hold parameters, by position or name. Their floating-point arrays
            are used in the compute dtype where they meet activations, and are cast there, so that
            their gradients add up in float32. All other arguments (targets, positions) stay as they
            are until they enter a contraction.
        reduce_dtype: The dtype in which the gradients of parameters come out of contractions. It is
            also the dtype in which they are summed over devices if the batch is sharded under
            `jit`. `None` means the compute dtype, or float32 if the compute dtype is float16: a few
            finite float16 shards can add up to infinity.
        scaling: The state of the policy's recipe, an `F8Scaling`, for recipes that have state. The
            state is used but not changed; gradient transforms do both.

    Returns:
        A function of the same arguments.

    Raises:
        ValueError: When called, if a rule of the policy matches nothing in the function; the
            message names the nearest candidates.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        def loss(params, x, y):
            hidden = jax.nn.gelu(x @ params["up"])
            return jnp.mean((jax.nn.softmax(hidden @ params["down"]) - y) ** 2)


        params = {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 4))}
        x, y = jnp.ones((2, 8)), jnp.zeros((2, 4))
        value, grads = jax.value_and_grad(halfstep.autocast(loss, "bf16"))(params, x, y)
        assert value.dtype == grads["up"].dtype == jnp.float32
        ```
    """
    _check_function(func)
    policy = as_policy(policy)
    settings = settings_of(policy, reduce_dtype=reduce_dtype)
    if scaling is not None and not hasattr(scaling, "slots"):
        raise TypeError(
            "`scaling` of `autocast` must be the state of a recipe, or None; got "
            f"{type(scaling).__name__}. Pass what F8Scaling.init returns; a loss is scaled by "
            "filter_grad and filter_value_and_grad."
        )
    state = None if scaling is None else scaling.slots(scaling.probes())
    check_state(policy, has_state=state is not None)

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        made = rewritten(func, settings, params=listed(params), keep=policy.keep, state=state)
        return refusing(autocast, option_names(autocast), func, made)

    return decorate if func is None else decorate(func)


def _check_function(func: object) -> None:
    if func is None or callable(func):
        return
    fix = "Pass the function and then call the result: autocast(func)(*args)."
    if isinstance(func, str | Policy):
        fix = f"A decorator takes the policy by name: @halfstep.autocast(policy={str(func)!r})."
    raise TypeError(f"`func` of `autocast` must be a function; got {described(func)}. {fix}")


def check_state(policy: Policy, *, has_state: bool) -> None:
    """Raise if a policy's recipe needs state and has none."""
    recipes = recipes_of(policy.recipe, policy.rules)
    found = next((recipe for recipe in recipes if recipe.needs_state), None)
    if found is not None and not has_state:
        own = found if policy.recipe is None else policy.recipe
        key = ", key=jax.random.key(0)" if any(one.is_random for one in recipes) else ""
        rules = ", policy=policy" if policy.rules else ""
        raise ValueError(
            f"the recipe {found.name!r} has state, and none was given: make it with "
            f"scaling = halfstep.RECIPES[{own.name!r}].init(loss, *args{key}{rules}), and pass "
            "scaling=scaling."
        )


def rewritten(
    func: Callable[..., Any],
    settings: Settings,
    *,
    params: Collection[int | str],
    keep: Sequence[str] = (),
    every_rule: bool = True,
    state: Mapping[str, Slot | Off] | None = None,
    is_loss: bool = False,
) -> Callable[..., Any]:
    """Return a function whose operations run as the settings say.

    Args:
        func: Any function that can be traced.
        settings: What the user has asked for.
        params: Which arguments hold parameters, by position or name.
        keep: Path rules for arguments that stay in float32.
        every_rule: Whether a rule that matches nothing in the function is an error.
        state: The recipe's state for each product, by name.
        is_loss: Whether its first result is a loss. A loss stays float32, even if parameters that
            are stored in 16 bits would make it a 16-bit number.
    """

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # The compute dtype is not narrower than float32: the function runs untraced, as it is.
        if settings.compute.itemsize >= 4:
            return func(*args, **kwargs)
        call = trace(func, settings, args, kwargs, params=params, keep=keep)
        if every_rule:
            check_rules(call.plan)
        return call.rebuild(run_traced(call, call.arrays, state=state, is_loss=is_loss))

    return wrapped


def run_traced(
    call: TracedCall,
    arrays: Sequence[ArrayLike],
    *,
    state: Mapping[str, Slot | Off] | None = None,
    is_loss: bool = False,
    sharing: Sharing | None = None,
) -> list[jax.Array]:
    """Run a call that is already planned, on its own arrays or on others.

    Args:
        call: The traced call, with its plan.
        arrays: Arrays of the shapes and dtypes that it was traced with.
        state: As for `rewritten`.
        is_loss: As for `rewritten`.
        sharing: The functions that parts of its plan share, if the caller keeps them.

    Returns:
        The arrays of the call's results.
    """
    arrays = observe(call, arrays)
    outputs = call.plan.graph.outputs
    slots = None if state is None else placed(call.plan, state)
    kinds = [Kind.WIDE] * len(outputs)
    results = run(call.plan, arrays, kinds, slots=slots, sharing=sharing)
    avals = list(call.results)
    if is_loss and avals:
        avals[0] = call.plan.graph.aval(outputs[0])
    return [as_traced(*pair) for pair in zip(results, avals, strict=True)]


def as_traced(value: ArrayLike, aval: ShapedArray) -> jax.Array:
    """Return a result as it is without autocast: an array, weakly typed if it would be there."""
    if not isinstance(value, jax.Array):
        # The result is a number that is written into the program.
        value = jnp.asarray(value, aval.dtype)
    if value.dtype != aval.dtype:
        # The result is made of parameters that are stored in 16 bits.
        value = jax.lax.convert_element_type(value, aval.dtype)
    if not getattr(aval, "weak_type", False) or jax.typeof(value).weak_type:
        return value
    # `jax.lax.convert_element_type` always makes a strongly typed array.
    return jax.lax.convert_element_type_p.bind(
        value, new_dtype=aval.dtype, weak_type=True, sharding=None
    )


def settings_of(policy: Policy, *, reduce_dtype: DTypeLike | None = None) -> Settings:
    """Return the settings of autocast for a policy."""
    if policy.mode != "autocast":
        raise ValueError(
            f"the policy {str(policy)!r} casts arguments and nothing else; leave "
            "':inputs' out of it, or use cast_function."
        )
    return Settings(
        np.dtype(policy.compute),
        rules=policy.rules,
        accumulate=policy.accumulate is not None,
        reduce=_reduce_dtype(reduce_dtype, policy.compute),
        recipe=policy.recipe,
        saves=Saves(code=policy.residuals, rules=policy.stores),
    )


def _reduce_dtype(dtype: DTypeLike | None, compute: np.dtype) -> np.dtype | None:
    if dtype is None:
        return FLOAT32 if compute == np.dtype(np.float16) else None
    parsed = parse_dtype(dtype)
    if parsed not in (FLOAT32, compute):
        raise ValueError(
            f"`reduce_dtype` is float32 or the compute dtype, {dtype_name(compute)}; got {dtype!r}."
        )
    return parsed


# A rule that matches nothing is a mistake, and the error says so.


def check_rules(plan: Plan) -> None:
    """Raise if one of the user's rules has decided nothing in a plan.

    Raises:
        ValueError: With the names that come nearest to those in the rule.
    """
    rules: list[PrecisionRule | StoreRule] = [*plan.settings.rules, *plan.settings.saves.rules]
    if not rules:
        return
    used, names, scopes = set(), set(), set()
    loops = set[str]()
    for owner, index in decided(plan):
        node = owner.graph.nodes[index]
        decision = owner.decisions[index]
        used |= {decision.by, decision.stored_by, decision.recipe_by}
        used |= {carry.by for carry in decision.carries}
        names.add(node.name)
        if isinstance(node.structure, Scan | While):
            loops.add(node.structure.name)
        parts = node.scope.split("/")
        scopes |= {"/".join(parts[: count + 1]) for count in range(len(parts)) if parts[0]}
    for rule in rules:
        # A rule for every operation is right for a function that has nothing to store, too.
        is_for_all = isinstance(rule, StoreRule) and rule.is_for_all
        if str(rule) not in used and not is_for_all:
            found = _candidates(rule, names, scopes, loops)
            raise ValueError(
                f"the rule {str(rule)!r} is for nothing in this function, or an earlier rule is "
                f"for all of it. Nearest candidates: {found}. An "
                "operation is a primitive of JAX: softmax is several, and halfstep.explain lists "
                "all. A scope is one of jax.named_scope's, '/' separates them, and '**' stands for "
                "any number. Use one of these, or leave the rule out."
            )


def _candidates(
    rule: PrecisionRule | StoreRule, names: set[str], scopes: set[str], loops: set[str]
) -> str:
    """Return the operations, loops and scopes of a function that come nearest to a rule."""
    near = []
    if isinstance(rule, PrecisionRule) and (rule.loop is not None or rule.is_reading):
        near.append(f"functions of loops: {_nearest(rule.loop or '', loops)}")
    if rule.op is not None and rule.op not in names:
        near.append(f"operations: {_nearest(rule.op, names)}")
    if rule.scope is not None:
        near.append(f"scopes: {_nearest(rule.scope, scopes)}")
    return "; ".join(near) or f"operations: {_nearest(rule.op or '', names)}"


def _nearest(wanted: str, names: set[str]) -> str:
    last = wanted.rsplit("/", 1)[-1]
    by_end = sorted(name for name in names if name.rsplit("/", 1)[-1] == last)
    near = difflib.get_close_matches(wanted, sorted(names), n=3, cutoff=0.5)
    shown = list(dict.fromkeys([*by_end, *near]))[:3] or sorted(names)[:5]
    return ", ".join(map(repr, shown)) or "none"
