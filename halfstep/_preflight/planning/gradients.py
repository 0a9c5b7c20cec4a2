"""Measure the gradients that a training step computes, without changing the step.

A step returns new parameters, not the gradients that they were computed from. So each array that
enters a rewritten function passes through an identity, whose derivative sends the incoming
cotangent to the host.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from halfstep._autocast import TracedCall, observed

Gradients = dict[tuple[int, int], list[np.ndarray]]
"""Gradients by the number of the call and the position of the array, one for each run."""


def gradients(step: Callable[..., Any], args: Sequence[Any]) -> Gradients:
    """Run a step on real arrays, and return the gradients of its rewritten functions."""
    found: Gradients = defaultdict(list)
    calls = 0

    def observer(call: TracedCall, arrays: Sequence[Any]) -> list[Any]:
        nonlocal calls
        del call
        number = calls
        calls += 1
        return [
            _tapped(array, lambda value, key=(number, position): found[key].append(np.array(value)))
            if jnp.issubdtype(array.dtype, jnp.inexact)
            else array
            for position, array in enumerate(arrays)
        ]

    # The step gets copies: it may reuse the memory of its arguments.
    given = jax.tree.map(
        lambda leaf: jnp.array(leaf) if isinstance(leaf, jax.Array) else leaf, args
    )
    with observed(observer):
        jax.block_until_ready(eqx.filter_jit(step)(*given))
    jax.effects_barrier()
    return found


def _tapped(array: Any, tell: Callable[[Any], None]) -> Any:
    @jax.custom_vjp
    def same(value: Any) -> Any:
        return value

    def backward(_: None, gradient: Any) -> tuple[Any]:
        jax.debug.callback(tell, gradient)
        return (gradient,)

    same.defvjp(lambda value: (value, None), backward)
    return same(array)


def relative_error(got: Gradients, exact: Gradients) -> float:
    """Compute the distance of all gradients together from the exact ones, relative to their norm.

    Raises:
        ValueError: If the two are not gradients of the same calls.
    """
    if not exact or {k: len(v) for k, v in got.items()} != {k: len(v) for k, v in exact.items()}:
        raise ValueError(
            f"steps for two policies must have as many gradients; got {len(got)} and {len(exact)}. "
            "Let make_step use its policy for autocast, and for nothing that changes the model."
        )
    off = length = 0.0
    for key, values in exact.items():
        for ours, theirs in zip(got[key], values, strict=True):
            off += float(np.sum(np.square(np.float64(ours) - np.float64(theirs))))
            length += float(np.sum(np.square(np.float64(theirs))))
    return math.sqrt(off / length) if length else math.inf if off else 0.0
