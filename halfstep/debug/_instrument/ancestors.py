"""Find the recorded values that a value is computed from, through loops, branches and calls."""

import dataclasses
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue
from jax.typing import ArrayLike

from halfstep._program import Constant, Operand, Scan
from halfstep.debug._instrument.body import Body
from halfstep.debug._instrument.layout import Layout

Turns = tuple[float, ...]
"""The iteration of each loop around a value, counted in running order; infinity is the last."""
# Infinity minus one is infinity. The iteration before the last one, whose number is not known, is
# therefore the last one again, and `seen` ends the walk after one visit of each value.
ANY = math.inf


Seen = set[tuple[Body, int, Turns]]
"""The values that a walk has visited, each with its iterations: loops create cycles."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """A value in one iteration of each loop around it."""

    body: Body
    operand: Operand
    turns: Turns


class Parents:
    """Finds the recorded values that other values are computed from."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._outer: dict[Body, tuple[Body, int]] = {}
        self._link(layout.body)

    def _link(self, body: Body) -> None:
        for index, bodies in body.inner.items():
            for inner in bodies:
                self._outer[inner] = (body, index)
                self._link(inner)

    def runs_backwards(self, body: Body) -> tuple[bool, ...]:
        """Return for each loop around a function, outermost first, whether it runs in reverse."""
        if body not in self._outer:
            return ()
        outer, index = self._outer[body]
        structure = outer.graph.nodes[index].structure
        is_reversed = isinstance(structure, Scan) and structure.reverse
        own = (is_reversed,) if _is_loop(body) else ()
        return (*self.runs_backwards(outer), *own)

    def of_outputs(self) -> Iterator[tuple[int | Constant, Turns]]:
        """Yield the recorded values that the program returns or computes its results from."""
        body = self._layout.body
        for operand in body.graph.outputs:
            yield from self._resolve(Moment(body, operand, ()), set())

    def of_site(self, row: int, turns: Turns) -> Iterator[tuple[int | Constant, Turns]]:
        """Yield what a site is computed from: rows, and constants that are not finite."""
        body, number = self._layout.owners[row]
        maker = body.graph.maker(number)
        seen: Seen = set()
        if maker is None:
            yield from self._of_input(Moment(body, number, turns), seen)
            return
        for operand in body.graph.nodes[maker].ins:
            yield from self._resolve(Moment(body, operand, turns), seen)

    def operands(self, row: int, turns: Turns) -> list[int | Constant]:
        """Return the operands of a site's operation: for each, the nearest row or a constant."""
        body, number = self._layout.owners[row]
        maker = body.graph.maker(number)
        found: list[int | Constant] = []
        for operand in () if maker is None else body.graph.nodes[maker].ins:
            root = body.root(operand)
            if isinstance(root, Constant):
                found.append(root)
                continue
            # If there are several, as for the branches of a `cond`, the first stands for all:
            # reports have one line per operand.
            found += [value for value, _ in self._resolve(Moment(body, root, turns), set())][:1]
        return found

    def between(self, row: int) -> list[str]:
        """Name the operations of the same function from the last recorded values up to a site."""
        body, number = self._layout.owners[row]
        found: dict[int, str] = {}
        waiting: list[Operand] = [number]
        while waiting:
            maker = body.graph.maker(waiting.pop())
            if maker is None or maker in found:
                continue
            node = body.graph.nodes[maker]
            # The operation depends on constants only, so it cannot be the cause.
            if all(isinstance(operand, Constant) for operand in node.ins):
                continue
            found[maker] = node.name
            waiting += [o for o in node.ins if self._is_unknown(body, body.root(o))]
        names = [name for index, name in sorted(found.items()) if not body.is_move(index)]
        return list(dict.fromkeys(names))

    def _is_unknown(self, body: Body, operand: Operand) -> bool:
        return not isinstance(operand, Constant) and self._layout.row(body, operand) is None

    def is_checked(self, row: int) -> bool:
        """Return whether a value is compared, or tested with `is_finite`."""
        body, number = self._layout.owners[row]
        for index, node in enumerate(body.graph.nodes):
            if body.is_move(index):
                continue
            takes = any(body.root(operand) == number for operand in node.ins)
            # Comparisons and `is_finite` take floating-point values but return none.
            if takes and not any(_is_inexact(body.graph.avals[out]) for out in node.outs):
                return True
        return False

    def _resolve(self, moment: Moment, seen: Seen) -> Iterator[tuple[int | Constant, Turns]]:
        body, turns = moment.body, moment.turns
        operand = body.root(moment.operand)
        if isinstance(operand, Constant):
            # Finite constants are harmless; the `-inf` of a mask may be the origin.
            if _is_bad(operand.value):
                yield operand, turns
            return
        if (body, operand, turns) in seen:
            return
        seen.add((body, operand, turns))
        row = self._layout.row(body, operand)
        if row is not None:
            yield row, turns
            return
        index = body.graph.maker(operand)
        if index is None:
            yield from self._of_input(Moment(body, operand, turns), seen)
        elif index in body.inner:
            position = body.graph.nodes[index].outs.index(operand)
            # All branches are followed: rows of a branch that did not run say so. The results of a
            # loop are those of its last iteration.
            for inner in body.inner[index]:
                inside = (*turns, ANY) if _is_loop(inner) else turns
                out = inner.graph.outputs[position]
                yield from self._resolve(Moment(inner, out, inside), seen)
        else:
            for other in body.graph.nodes[index].ins:
                yield from self._resolve(Moment(body, other, turns), seen)

    def _of_input(self, moment: Moment, seen: Seen) -> Iterator[tuple[int | Constant, Turns]]:
        """Resolve an input of a function, outside the function or in the previous iteration."""
        body, turns = moment.body, moment.turns
        if body not in self._outer or moment.operand not in body.graph.inputs:
            return
        outer, index = self._outer[body]
        called, position = body.called, body.graph.inputs.index(moment.operand)
        if called is None or called.operands is None:
            return
        operand = outer.graph.nodes[index].ins[called.operands[position]]
        if not called.is_loop:
            yield from self._resolve(Moment(outer, operand, turns), seen)
            return
        turn = turns[-1]
        is_carried = position in called.carried
        if is_carried and turn > 0:
            result = body.graph.outputs[called.carried.index(position)]
            before = Moment(body, result, (*turns[:-1], turn - 1))
            yield from self._resolve(before, seen)
        # The last iteration may be the only one, and then its carry is the initial value.
        if not is_carried or turn <= 0 or turn == ANY:
            yield from self._resolve(Moment(outer, operand, turns[:-1]), seen)


def _is_loop(body: Body) -> bool:
    return body.called is not None and body.called.is_loop


def _is_inexact(value: AbstractValue | np.ndarray) -> bool:
    # Not `np.issubdtype`, which does not count bfloat16 and fp8 as floating point.
    return jnp.issubdtype(getattr(value, "dtype", np.dtype(bool)), jnp.inexact)


def _is_bad(value: ArrayLike) -> bool:
    array = np.asarray(value)
    return _is_inexact(array) and not np.isfinite(array).all()
