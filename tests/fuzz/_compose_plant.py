"""Errors that are planted in composed programs, to see what the oracle finds."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import halfstep
from tests.fuzz._compose import Composition
from tests.fuzz._compose_names import Plain
from tests.fuzz._compose_oracle import by_halfstep, half_dtype
from tests.fuzz._compose_run import Subject


def _floats(function: Callable[[Any], Any], carry: Any) -> Any:
    return jax.tree.map(
        lambda leaf: function(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, carry
    )


class RoundedCarry(Plain):
    """Every iteration rounds its carry to 16 bits: state that is held in them."""

    def __init__(self, half: Any) -> None:
        self.half = half

    def carry(self, carry: Any) -> Any:
        return _floats(lambda leaf: leaf.astype(self.half).astype(leaf.dtype), carry)


class RoundedCotangent(RoundedCarry):
    """Every iteration rounds the cotangent of its carry to 16 bits."""

    def carry(self, carry: Any) -> Any:
        @jax.custom_jvp
        def same(leaf: Any) -> Any:
            return leaf

        # The transpose of a cast is a cast.
        @same.defjvp
        def _(primals: Any, tangents: Any) -> Any:
            (tangent,) = tangents
            return primals[0], tangent.astype(self.half).astype(tangent.dtype)

        return _floats(same, carry)


class SwappedCarry(Plain):
    """Every iteration swaps the first two parts of its carry that are alike."""

    def carry(self, carry: Any) -> Any:
        leaves, tree = jax.tree.flatten(carry)
        for place, (first, second) in enumerate(itertools.pairwise(leaves)):
            if first.shape == second.shape and first.dtype == second.dtype:
                leaves[place], leaves[place + 1] = second, first
                break
        return jax.tree.unflatten(tree, leaves)


class DroppedUpdate(Plain):
    """Every iteration loses a thousandth of what it has added to a large carry."""

    def carry(self, carry: Any) -> Any:
        return _floats(lambda leaf: leaf * 0.999, carry)


PLANTED: dict[str, Callable[[Any], Plain]] = {
    "rounded carry": RoundedCarry,
    "rounded cotangent": RoundedCotangent,
    "swapped carry": lambda half: SwappedCarry(),
    "lost thousandth": lambda half: DroppedUpdate(),
}


def planted(name: str) -> Subject:
    """Return halfstep with an error in every carry."""

    def subject(made: Composition) -> Any:
        return by_halfstep(made, PLANTED[name](half_dtype(made)))

    return subject


@contextlib.contextmanager
def without_unscaling() -> Iterator[None]:
    """halfstep that never divides gradients by the loss scale."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halfstep.StaticLossScaling, "unscale", lambda scaling, tree: tree)
        yield
