"""Accumulate gradients: process one step's batch in several iterations of a scan."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from halfstep._base import (
    Arguments,
    at_least_float32,
    is_array,
    is_key,
    type_of,
    varying_axes,
)
from halfstep._program import Invariants
from halfstep._training.collective import vary

# (args, kwargs) -> (loss, aux, gradients, magnitudes), for one microbatch.
Step = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any, Any, Any]]


def _split(leaf: jax.Array | np.ndarray | np.generic, path: str, n: int) -> jax.Array:
    """Split `[B, ...]` into `[n, B/n, ...]`; microbatch `i` takes the examples `i, i + n, ...`.

    The split is strided rather than in blocks: a batch sharded over devices stays where it is,
    because every device's examples are dealt to all microbatches.
    """
    if leaf.ndim == 0 or leaf.shape[0] % n:
        size = "no leading axis" if leaf.ndim == 0 else f"a leading axis of {leaf.shape[0]}"
        raise ValueError(
            f"microbatches={n} needs the leading axis of every batch leaf to be a multiple of {n}; "
            f"`{path}` is {type_of(leaf)}, with {size}. "
            f"Pass a batch of another size, or leave `{path}` out of `batch` if it has no batch "
            "axis."
        )
    leaf = jnp.asarray(leaf)
    return jnp.moveaxis(leaf.reshape((leaf.shape[0] // n, n, *leaf.shape[1:])), 1, 0)


def _is_old_key(leaf: PyTree) -> bool:
    # By shape and dtype: nothing else tells a key of `jax.random.PRNGKey` from two numbers.
    return is_array(leaf) and not is_key(leaf) and leaf.shape == (2,) and leaf.dtype == jnp.uint32


def _finder(aux: PyTree, structure: object, name: str) -> Callable[[PyTree], PyTree]:
    """Find the carried argument's new value in `aux`: all of `aux`, or one of its entries."""
    if jtu.tree_structure(aux) == structure:
        return lambda aux: aux
    entries: Mapping[Any, Any] = {}
    if isinstance(aux, Mapping):
        entries = aux
    elif isinstance(aux, tuple | list):
        entries = dict(enumerate(aux))
    found = [key for key, entry in entries.items() if jtu.tree_structure(entry) == structure]
    if len(found) != 1:
        raise ValueError(
            f"carry={name!r} needs the new value of that argument in the auxiliary output: "
            f"required exactly one entry of its structure, found {len(found)}. Return "
            "(loss, new_state) or (loss, {'state': new_state, ...}), with has_aux=True."
        )
    return lambda aux: aux[found[0]]


def accumulate(
    step: Step,
    call: Arguments,
    params: PyTree,
    *,
    microbatches: int,
    batch: Sequence[str],
    carry: str | None,
    encodes: bool = False,
) -> tuple[Any, Any, Any, Any]:
    """Sum the losses and gradients of all microbatches, in float32 and in their order.

    Args:
        step: Returns loss, auxiliary output, gradients and largest magnitudes of one microbatch.
        call: The arguments of the whole step.
        params: The differentiated leaves, whose shapes and shardings the sums take.
        microbatches: The number of microbatches.
        batch: Rules that select the leaves to split.
        carry: The argument that each microbatch hands to the next, or `None`.
        encodes: Whether the step encodes parameters in 8 or 4 bits: it does so once, and all
            microbatches read them.

    Returns:
        The sum of the losses, the auxiliary output (stacked; the carried argument's last value),
        the sum of the gradients, and the largest of the magnitudes.
    """
    if not batch:
        raise ValueError(
            f"microbatches={microbatches} needs to know what to split: "
            f"pass batch=(...) with names out of {', '.join(call.names[1:]) or 'no arguments'}."
        )
    if carry is not None and carry not in call.names[1:]:
        raise ValueError(
            f"carry={carry!r} is not an argument after the first; there are "
            f"{', '.join(call.names[1:])}. Name one of them."
        )
    selected = call.select(batch, option="batch")
    whole = [leaf for _, leaf, _ in call.leaves]
    roots = [path.split("/", 1)[0] for path, _, _ in call.leaves]
    xs: dict[int, Any] = {}
    for index, ((path, leaf, _), chosen) in enumerate(zip(call.leaves, selected, strict=True)):
        if chosen and roots[index] == call.names[0]:
            raise ValueError(
                f"batch={tuple(batch)!r} selects `{path}`, which belongs to the first argument: "
                "what is differentiated cannot be split. Name other arguments in `batch`."
            )
        if chosen and is_array(leaf):
            xs[index] = _split(leaf, path, microbatches)
        elif is_key(leaf) and leaf.ndim == 0 and roots[index] not in (call.names[0], carry):
            xs[index] = jax.random.split(leaf, microbatches)
        elif _is_old_key(leaf) and roots[index] not in (call.names[0], carry):
            warnings.warn(
                f"`{path}` is uint32[2], as PRNG keys of the old style are: every microbatch is "
                "given the same one. Pass jax.random.key(seed), or jax.random.wrap_key_data(key), "
                "which is split.",
                stacklevel=2,
            )
    carried = [i for i, root in enumerate(roots) if root == carry and is_array(whole[i])]
    if set(carried) & set(xs):
        raise ValueError(f"carry={carry!r} is also split by `batch`; leave it out of one of them.")

    def zeros(param: jax.Array) -> jax.Array:
        # `zeros_like` keeps the sharding of a parameter; a carry must also vary over the same axes
        # of a mesh before the first iteration as after it.
        wide = jnp.zeros_like(param, dtype=at_least_float32(param.dtype))
        return vary(wide, tuple(varying_axes(param)))

    # Filled while the scan traces its body: where the carried value is, and the part of `aux` that
    # is not made of arrays and cannot leave the scan.
    traced: dict[str, Any] = {}

    def iteration(sums: tuple[PyTree, list[jax.Array]], xs: Mapping[int, jax.Array]) -> Any:
        total, state = sums
        leaves = list(whole)
        for index, leaf in (*xs.items(), *zip(carried, state, strict=True)):
            leaves[index] = leaf
        args, kwargs = call.rebuild(leaves)
        loss, aux, grads, seen = step(args, kwargs)
        if carry is not None:
            value = dict(zip(call.names, (*args, *kwargs.values()), strict=True))[carry]
            traced["get"] = _finder(aux, jtu.tree_structure(value), carry)
            traced["value"] = traced["get"](aux)
            state = [leaf for leaf in jtu.tree_leaves(traced["value"]) if is_array(leaf)]
        # Summed in the carry and not stacked: one set of float32 gradients for all microbatches.
        total = jtu.tree_map(lambda a, g: a + g.astype(a.dtype), total, grads)
        arrays, traced["static"] = eqx.partition(aux, is_array)
        return (total, state), (loss, arrays, seen)

    first = (jtu.tree_map(zeros, params), [jnp.asarray(whole[index]) for index in carried])
    body = _with_shared_encodings(iteration, first, xs) if encodes else iteration
    (grads, state), (losses, arrays, seen) = jax.lax.scan(body, first, xs, length=microbatches)
    aux = eqx.combine(arrays, traced["static"])
    if carry is not None:
        values = iter(state)
        last = jtu.tree_map(lambda x: next(values) if is_array(x) else x, traced["value"])
        aux = eqx.tree_at(traced["get"], aux, last)
    seen = jtu.tree_map(lambda sizes: jnp.max(sizes, axis=0), seen)
    # In the order of the microbatches, as the gradients are: `jnp.sum` would choose its own order.
    return functools.reduce(jnp.add, losses), aux, grads, seen


def _with_shared_encodings(
    iteration: Callable[[Any, Any], Any], first: PyTree, xs: Mapping[int, jax.Array]
) -> Callable[[Any, Any], Any]:
    """Return an iteration that reads what all iterations would encode of the parameters."""
    one = {index: leaf[0] for index, leaf in xs.items()}
    traced, shape = jax.make_jaxpr(iteration, return_shape=True)(first, one)
    invariants = Invariants(traced)
    if not len(invariants):
        return iteration
    made = invariants.before([None] * len(traced.in_avals))
    tree = jtu.tree_structure(shape)

    def body(sums: PyTree, xs: PyTree) -> Any:
        return jtu.tree_unflatten(tree, invariants.rest(jtu.tree_leaves((sums, xs)), made))

    return body
