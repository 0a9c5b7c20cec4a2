"""Run a planned function as it is written, with the layers that it repeats as one function.

`explain` differentiates the function to know what it would store without `autocast`. JAX
differentiates a jitted function once, however often it is called, and the program is only looked
at, never compiled.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax

from halfstep._autocast import Kind, Plan, Region, Repeat, Sharing
from halfstep._program import Interpreter, bind_again


def run_as_written(plan: Plan, sharing: Sharing, *values: Any) -> list[Any]:
    """Run the function of a plan on values of the types that it was traced with.

    Args:
        plan: The plan; its decisions have no effect on results.
        sharing: Knows what layers repeat.
        *values: The values of its inputs.
    """
    run = _Run(plan.graph)
    run.enter(values)
    shared: dict[Hashable, Callable[..., Any]] = {}
    for unit in sharing.repeated([Kind.WIDE] * len(plan.graph.outputs)):
        if isinstance(unit, Repeat):
            func = shared.setdefault(unit.signature, jax.jit(_inside(plan, unit)))
            made = func(*map(run.read, unit.inputs))
            for place, value in zip(_made(unit), made, strict=True):
                run.write(unit.values[place], value)
        else:
            run.once(unit.nodes if isinstance(unit, Region) else (unit,))
    return list(map(run.read, plan.graph.outputs))


class _Run(Interpreter[Any]):
    """Runs each operation as it was traced."""

    def once(self, indices: Iterable[int]) -> None:
        """Run operations, except those that ran before: a region may copy broadcasts."""
        for index in indices:
            if not all(number in self.values for number in self.graph.nodes[index].outs):
                self.step(index)

    def bind(self, index: int, operands: Sequence[Any]) -> list[Any]:
        node = self.graph.nodes[index]
        return bind_again(node.primitive, node.params, operands)


def _made(repeat: Repeat) -> list[int]:
    """Return the places of the values that a repeat makes for others."""
    return sorted(place for place in repeat.wanted if place >= len(repeat.inputs))


def _inside(plan: Plan, repeat: Repeat) -> Callable[..., list[Any]]:
    def inside(*values: Any) -> list[Any]:
        run = _Run(plan.graph, entered=repeat.entered)
        for number, value in zip(repeat.inputs, values, strict=True):
            run.write(number, value)
        run.once(repeat.nodes)
        return [run.read(repeat.values[place]) for place in _made(repeat)]

    return inside
