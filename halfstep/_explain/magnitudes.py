"""Measure the results of contractions in one run of the function as it is written."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from halfstep._autocast import CONTRACTIONS
from halfstep._explain.places import PlanPlace
from halfstep._program import (
    Cond,
    Constant,
    CustomJvp,
    CustomVjp,
    CustomVmap,
    Jit,
    Operand,
    Remat,
    Scan,
    bind_again,
)

Key = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Magnitudes:
    """The largest magnitude of each contraction, and the operations that were not examined."""

    largest: dict[Key, float]
    """By the place's key and the number of the operation."""
    skipped: tuple[str, ...]


def magnitudes(place: PlanPlace, arrays: Sequence[Any]) -> Magnitudes:
    """Run a function once in the precision it is written in, and measure its contractions."""
    run = _Run()
    found = jax.jit(lambda *values: run.of(place, values)[1])(*arrays)
    return Magnitudes(
        {key: float(value) for key, value in found.items()}, tuple(dict.fromkeys(run.skipped))
    )


class _Run:
    """Runs plans as they are written, and returns magnitudes next to the function's results.

    Magnitudes that are collected on the way could not leave a loop or a branch, whose inside is
    traced by itself.
    """

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def of(self, place: PlanPlace, values: Sequence[Any]) -> tuple[list[Any], dict[Key, Any]]:
        """Return the results of a plan's function, and the magnitudes in it."""
        graph = place.plan.graph
        env: dict[int, Any] = dict(zip(graph.inputs, values, strict=True))
        env.update(graph.constants)
        largest: dict[Key, Any] = {}

        def read(operand: Operand) -> Any:
            return operand.value if isinstance(operand, Constant) else env[operand]

        for index, node in enumerate(graph.nodes):
            operands = [read(operand) for operand in node.ins]
            if place.holds_functions(index):
                results, found = self.nested(place, index, operands)
                largest.update(found)
            else:
                results = bind_again(node.primitive, node.params, operands)
            if node.name in CONTRACTIONS:
                magnitude = jnp.max(jnp.abs(results[0]), initial=0)
                largest[*place.key, index] = magnitude.astype(jnp.float32)
            env.update(zip(node.outs, results, strict=True))
        return [read(operand) for operand in graph.outputs], largest

    def nested(
        self, place: PlanPlace, index: int, operands: Sequence[Any]
    ) -> tuple[list[Any], dict[Key, Any]]:
        node = place.plan.graph.nodes[index]
        inner = place.inside(index)
        match node.structure:
            case Jit() | Remat() | CustomJvp() | CustomVjp() | CustomVmap():
                return self.of(inner[0], operands)
            case Scan() as loop:
                return self.scanned(loop, inner[0], operands)
            case Cond():
                return self.branched(inner, operands)
            case _:
                self.skipped.append(node.name)
                return bind_again(node.primitive, node.params, operands), {}

    def scanned(
        self, loop: Scan, inner: PlanPlace, operands: Sequence[Any]
    ) -> tuple[list[Any], dict[Key, Any]]:
        consts, init, xs = loop.split(operands)

        def body(carry: tuple[jax.Array, ...], x: tuple[jax.Array, ...]) -> Any:
            results, found = self.of(inner, [*consts, *carry, *x])
            return tuple(results[: loop.carries]), (tuple(results[loop.carries :]), found)

        carry, (ys, found) = loop.bind(body, tuple(map(jnp.asarray, init)), tuple(xs))
        return [*carry, *ys], {key: jnp.max(value, initial=0) for key, value in found.items()}

    def branched(
        self, inner: Sequence[PlanPlace], operands: Sequence[Any]
    ) -> tuple[list[Any], dict[Key, Any]]:
        which, *given = operands
        # All branches of a `switch` return the same structure: a branch returns zeros for the
        # contractions of the others.
        keys = {
            key
            for branch in inner
            for key in jax.eval_shape(lambda *values, b=branch: self.of(b, values)[1], *given)
        }

        def runner(branch: PlanPlace) -> Any:
            def run(*values: Any) -> Any:
                results, found = self.of(branch, values)
                return results, {key: found.get(key, jnp.float32(0)) for key in keys}

            return run

        return jax.lax.switch(which, [runner(branch) for branch in inner], *given)
