"""Commit a step or keep the old state: one decision over any set of trees."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jaxtyping import PyTree

from halfstep._base import checked, is_array, path_string, type_of
from halfstep._training.ledger import Ledger
from halfstep._training.verdict import as_predicate

T = TypeVar("T")

Gate = Literal["loop", "cond", "select"]


def select_tree(finite: Any, on_true: T, on_false: T) -> T:
    """Choose between two trees of the same structure.

    Args:
        finite: A boolean scalar or a `Verdict`; an unchecked verdict chooses `on_true`.
        on_true: The tree if `finite` is true.
        on_false: The tree if it is false; leaves that are not arrays must be the same in both.

    Returns:
        `on_true` or `on_false`, leaf by leaf under `jit`.

    Example:
        ```python
        import halfstep
        import jax.numpy as jnp

        new, old = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
        assert halfstep.select_tree(jnp.asarray(True), new, old)["w"][0] == 1
        ```
    """
    predicate = as_predicate(finite)
    if predicate is None:
        return on_true
    _check_same(on_false, on_true, "select_tree needs `on_true` to have the {} of `on_false`")
    return _selected(predicate, on_true, on_false)


def _selected(predicate: Any, on_true: T, on_false: T) -> T:
    def select(new: PyTree, old: PyTree) -> PyTree:
        if not is_array(new) or new is old:
            # `new is old`: a leaf that no step changes is not copied.
            return new
        return jax.lax.select(jnp.asarray(predicate), jnp.asarray(new), jnp.asarray(old))

    return jtu.tree_map(select, on_true, on_false)


def _describe(leaf: PyTree) -> str:
    return type_of(leaf) if is_array(leaf) else repr(leaf)


_COMMITTED = "a transaction needs the committed state to keep its {}"


def _check_same(old: PyTree, new: PyTree, required: str) -> None:
    """Raise unless two trees agree in structure, dtypes, shapes and static leaves.

    Args:
        old: The tree that the other one must agree with.
        new: The other tree.
        required: The beginning of the error, with `{}` in the place of what must agree.
    """
    if jtu.tree_structure(old) != jtu.tree_structure(new):
        raise ValueError(
            f"{required.format('tree structure')}.\n"
            f"  before: {jtu.tree_structure(old)}\n  after:  {jtu.tree_structure(new)}\n"
            "If an optimizer's state changed, initialize it with what is trained: "
            "optimizer.init(eqx.filter(model, eqx.is_inexact_array))."
        )
    for (path, before), after in zip(
        jtu.tree_flatten_with_path(old)[0], jtu.tree_leaves(new), strict=True
    ):
        if is_array(before) and is_array(after):
            same = before.dtype == after.dtype and before.shape == after.shape
        else:
            same = before is after or (not is_array(after) and bool(before == after))
        if not same:
            raise TypeError(
                f"{required.format('dtypes and shapes')}, so that a skipped step leaves "
                f"the same state behind: at `{path_string(path)}` {_describe(before)} became "
                f"{_describe(after)}. If an optimizer's state was made for 16-bit parameters, "
                "initialize it in float32: optimizer.init(halfstep.cast_to_float32(params))."
            )


def gated(finite: object, commit: Callable[[T], T], state: T, *, gate: Gate = "loop") -> T:
    """Return `commit(state)` if `finite`, else `state`. See `transaction`."""
    if gate not in ("loop", "cond", "select"):
        raise ValueError(f"`gate` is 'loop', 'cond' or 'select'; got {gate!r}.")
    predicate = as_predicate(finite)
    if predicate is None:
        # Never checked: a gate would only cost instructions.
        return commit(state)
    if not isinstance(predicate, Tracer):
        # Outside a trace the answer is known, and a Python branch compiles nothing.
        return commit(state) if bool(predicate) else state
    if gate == "select":
        new = commit(state)
        _check_same(state, new, _COMMITTED)
        return _selected(predicate, new, state)
    # Only arrays go through a loop or a conditional; functions and strings of a model stay outside.
    dynamic, static = eqx.partition(state, is_array)
    dynamic = jtu.tree_map(jnp.asarray, dynamic)

    def committed(dynamic: PyTree) -> PyTree:
        new = commit(eqx.combine(dynamic, static))
        _check_same(eqx.combine(dynamic, static), new, _COMMITTED)
        return jtu.tree_map(jnp.asarray, eqx.partition(new, is_array)[0])

    if gate == "cond":
        dynamic = jax.lax.cond(predicate, committed, lambda dynamic: dynamic, dynamic)
    else:
        # A loop of zero or one iterations. Unlike the branches of a conditional, a loop's carry is
        # updated in place. For a conditional, XLA may hold temporaries for both branches, and
        # compiles a fifth more instructions (docs/update-or-skip.md has the measurement). A select
        # after the fact needs the old state until the new one is complete, and computes values that
        # it throws away.
        # `carry[0] & False` and not `False`: inside `shard_map` the flag must vary over the same
        # axes when it comes out as when it went in.
        _, dynamic = jax.lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (carry[0] & False, committed(carry[1])),
            (predicate, dynamic),
        )
    return eqx.combine(dynamic, static)


@checked
def transaction(
    finite: Any, commit: Callable[[T], T], state: T, ledger: Ledger, *, gate: Gate = "loop"
) -> tuple[T, Ledger]:
    """Commit a whole step, or none of it.

    If the step is finite, the state that `commit` returns replaces `state`: parameters, optimizer
    state, batch statistics, averages, schedules. Otherwise `state` is returned unchanged. The
    ledger counts the step either way.

    Args:
        finite: A boolean scalar or a `Verdict`.
        commit: A function from the old state to the new one, which has the same structure, dtypes
            and shapes. It may close over gradients and anything else. It runs only if the step is
            finite.
        state: Any pytree.
        ledger: The ledger that counts the step.
        gate: How the decision is compiled. `"loop"`, a loop of at most one iteration, has the
            fewest instructions and temporaries. `"cond"` and `"select"` can be differentiated
            through in reverse mode (a loop cannot); `"select"` computes the new state in any case.

    Returns:
        The state and the ledger after the step.

    Example:
        ```python
        import halfstep
        import jax
        import jax.numpy as jnp


        @jax.jit
        def step(state, ledger, gradient):
            def commit(state):
                weight = state["weight"] - 0.1 * gradient
                return {"weight": weight, "ema": 0.9 * state["ema"] + 0.1 * weight}

            finite = halfstep.all_finite(gradient)
            return halfstep.transaction(finite, commit, state, ledger)


        state = {"weight": jnp.ones(2), "ema": jnp.ones(2)}
        state, ledger = step(state, halfstep.Ledger(), jnp.array([1.0, jnp.nan]))
        assert ledger.skipped == 1
        assert (state["weight"] == 1).all()
        ```
    """
    return gated(finite, commit, state, gate=gate), ledger.record(finite)
