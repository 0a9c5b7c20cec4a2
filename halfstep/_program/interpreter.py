"""Run a traced program again, operation by operation, with another rule for each operation.

`autocast`, `debug.record` and `debug.compare` are interpreters: each walks the graph of a function
and runs every operation in its own way. This module holds the parts that all of them share: the
order of operations, the line and scopes that each operation keeps, and how a loop, a branch, a call
or a `shard_map` runs again with other functions inside.

Interpreters differ in two things. A *value* is what an interpreter has for one value of the
program: an array, or a pair of arrays (the policy's and float32's). The pair is a pytree, so that
JAX's loops carry it as they carry an array. An inner function may also return an *extra output*
(`beside`) in addition to its results, such as the rows of a record. Only the interpreter knows how
to combine the extra outputs of the iterations of a loop, the branches of a `cond` and the shards of
a `shard_map`.
"""

import abc
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from halfstep._program.graph import Constant, Graph, Node, Operand
from halfstep._program.structures import (
    Cond,
    CustomJvp,
    CustomVjp,
    CustomVmap,
    Jit,
    Remat,
    Scan,
    ShardMap,
    Structure,
    While,
)

_Value = TypeVar("_Value")
_Beside = TypeVar("_Beside")


class Interpreter(abc.ABC, Generic[_Value]):
    """One run of one function of a program: its values so far, by number."""

    def __init__(self, graph: Graph, *, entered: int = 0) -> None:
        self.graph = graph
        self.entered = entered
        """How many scopes that all operations share are entered already."""
        self.values: dict[int, _Value] = {}

    @abc.abstractmethod
    def bind(self, index: int, operands: Sequence[_Value]) -> Iterable[_Value]:
        """Run one operation by the interpreter's own rule."""

    def constant(self, value: Any) -> Any:
        """Return what the interpreter has for a value that is written into the program."""
        return value

    def operand(self, operand: Operand, index: int) -> _Value:
        """Return an operand in the form in which one operation takes it."""
        del index
        return self.read(operand)

    def read(self, operand: Operand) -> _Value:
        """Return a value that was computed, was given, or is written into the program."""
        if isinstance(operand, Constant):
            return self.constant(operand.value)
        return self.values[operand]

    def write(self, number: int, value: _Value) -> None:
        """Keep a value for the operations that read it."""
        self.values[number] = value

    def enter(self, values: Sequence[_Value]) -> None:
        """Write the constants and the inputs of the function."""
        for number, value in self.graph.constants:
            self.write(number, self.constant(value))
        for number, value in zip(self.graph.inputs, values, strict=True):
            self.write(number, value)

    def walk(self, values: Sequence[_Value]) -> None:
        """Run all operations, in the order of the program."""
        self.enter(values)
        for index in range(len(self.graph.nodes)):
            self.step(index)

    def step(self, index: int) -> None:
        """Run one operation on the values so far, with its own line and scopes."""
        node = self.graph.nodes[index]
        with node.in_scope(self.entered):
            operands = [self.operand(operand, index) for operand in node.ins]
            results = self.bind(index, operands)
            for number, result in zip(node.outs, results, strict=True):
                self.write(number, result)


class Inside(abc.ABC, Generic[_Value, _Beside]):
    """How an interpreter runs the functions inside one operation.

    The methods after `run` have defaults for interpreters whose values are arrays and that have no
    extra outputs. Other interpreters override the methods that they need.
    """

    def __init__(self, node: Node) -> None:
        self.node = node

    @abc.abstractmethod
    def run(
        self, number: int, values: Sequence[_Value], state: PyTree
    ) -> tuple[Sequence[_Value], _Beside]:
        """Run one of the functions: the body of a loop, a branch, or a called function.

        Args:
            number: The number of the function; a loop's test is not counted.
            values: The values of its inputs.
            state: The interpreter's state for this iteration or branch.
        """

    def goes_on(self, values: Sequence[_Value]) -> jax.Array:
        """Return whether a `while` goes on, given the test's constants and the carries."""
        return jaxpr_as_fun(self.node.structured(While).test)(*values)[0]

    def choice(self, value: _Value) -> Any:
        """Return which branch of a `cond` runs."""
        return value

    def call(
        self, structure: Structure, operands: Sequence[_Value], state: PyTree
    ) -> tuple[Sequence[_Value], _Beside]:
        """Run a call that JAX treats specially when it is differentiated or mapped.

        By default the function is only called: an interpreter that is not differentiated does not
        need the rest.
        """
        del structure
        return self.run(0, operands, state)

    # These methods combine the extra outputs of several runs into one.

    def of_turns(self, loop: Scan, beside: _Beside) -> _Beside:
        """Combine the extra outputs of all iterations of a `scan`, which are stacked."""
        del loop
        return beside

    def before_turns(self, shapes: Callable[[], _Beside]) -> Any:
        """Return the extra carry with which a `while` begins; `shapes` traces one iteration."""
        del shapes
        return ()

    def after_turn(self, before: Any, beside: _Beside) -> Any:
        """Return the extra carry of a `while` after one more iteration."""
        del beside
        return before

    def after_turns(self, last: Any) -> _Beside:
        """Return the extra output of all iterations of a `while`, given the last extra carry."""
        return last

    def of_branch(self, number: int, beside: _Beside, shapes: Callable[[int], _Beside]) -> _Beside:
        """Give the extra output of a branch the form that all share; `shapes` traces a branch."""
        del number, shapes
        return beside

    def of_shards(self, beside: _Beside) -> _Beside:
        """Combine the extra outputs of all shards, which have an axis of shards in front."""
        return beside


def run_inside(
    inside: Inside[_Value, _Beside], operands: Sequence[_Value], state: PyTree = None
) -> tuple[list[_Value], _Beside]:
    """Run an operation that holds functions, in the way of an interpreter.

    Args:
        inside: How the functions of the operation are run.
        operands: The operands of the operation.
        state: The interpreter's state, passed to the functions in addition to the operands. A
            `scan` slices it by iterations, and a `cond` takes one state for each branch. Functions
            that no state reaches are given `None`.

    Returns:
        The results of the operation, and the extra output of its functions.
    """
    structure = inside.node.structured(*_RUNNERS)
    results, beside = _RUNNERS[type(structure)](inside, structure, operands, state)
    return list(results), beside


def _scan(inside: Inside[Any, Any], loop: Scan, operands: Sequence[Any], state: PyTree) -> Any:
    consts, init, xs = loop.split(operands)

    def body(carry: Sequence[Any], turn: Any) -> Any:
        x, own = turn
        results, beside = inside.run(0, [*consts, *carry, *x], own)
        return tuple(results[: loop.carries]), (tuple(results[loop.carries :]), beside)

    # State is sliced like the operands, one slot for each iteration. `None` has no leaves, and
    # neither has `()`, so an interpreter that uses neither state nor `beside` makes the loop that
    # the program had.
    carry, (ys, beside) = loop.bind(body, tuple(init), (tuple(xs), state))
    return [*carry, *ys], inside.of_turns(loop, beside)


def _while(inside: Inside[Any, Any], loop: While, operands: Sequence[Any], state: PyTree) -> Any:
    # A `while` has no known number of iterations by which state could be sliced.
    del state
    of_test, of_body, init = loop.split(operands)

    def turn(carry: Sequence[Any]) -> Any:
        return inside.run(0, [*of_body, *carry], None)

    def body(carry: Sequence[Any], before: Any) -> Any:
        results, beside = turn(carry)
        return tuple(results), inside.after_turn(before, beside)

    start = inside.before_turns(lambda: jax.eval_shape(turn, tuple(init))[1])
    carry, last = loop.bind(
        lambda carry: inside.goes_on([*of_test, *carry]), body, tuple(init), start
    )
    return carry, inside.after_turns(last)


def _cond(inside: Inside[Any, Any], cond: Cond, operands: Sequence[Any], state: PyTree) -> Any:
    index, *values = operands

    def run(number: int, values: Sequence[Any]) -> Any:
        return inside.run(number, values, None if state is None else state[number])

    # All branches return the same structure, so a branch that returns its own rows needs room for
    # the rows of the others. Only an interpreter that calls `shapes` pays for this, by tracing
    # branches twice.
    @functools.cache
    def shapes(number: int) -> Any:
        return jax.eval_shape(functools.partial(run, number), values)[1]

    def branch(number: int) -> Callable[..., Any]:
        def func(*values: Any) -> Any:
            results, beside = run(number, values)
            return tuple(results), inside.of_branch(number, beside, shapes)

        return func

    branches = [branch(number) for number in range(len(cond.branches))]
    return cond.bind(inside.choice(index), branches, *values)


def _jit(inside: Inside[Any, Any], call: Jit, operands: Sequence[Any], state: PyTree) -> Any:
    def func(*values: Any) -> Any:
        results, beside = inside.run(0, values, state)
        return tuple(results), beside

    # `None`: the compiler chooses the sharding of the extra outputs.
    return call.bind(func, *operands, more=(None,))


def _shard_map(
    inside: Inside[Any, Any], mapped: ShardMap, operands: Sequence[Any], state: PyTree
) -> Any:
    # State would need its own specs, which the user's `shard_map` does not have.
    del state

    def func(*values: Any) -> Any:
        results, beside = inside.run(0, values, None)
        # Every shard returns its own extra output. A new axis in front, divided over all axes of
        # the mesh that the program maps over, keeps them apart.
        return tuple(results), jax.tree.map(lambda leaf: leaf[None], beside)

    out_specs = (mapped.out_specs, PartitionSpec(mapped.axes))
    results, beside = mapped.bind(func, *operands, out_specs=out_specs)
    return results, inside.of_shards(beside)


def _call(
    inside: Inside[Any, Any], structure: Structure, operands: Sequence[Any], state: PyTree
) -> Any:
    return inside.call(structure, operands, state)


_RUNNERS: Mapping[type[Structure], Callable[..., Any]] = MappingProxyType(
    {
        Scan: _scan,
        While: _while,
        Cond: _cond,
        Jit: _jit,
        ShardMap: _shard_map,
        **dict.fromkeys((Remat, CustomJvp, CustomVjp, CustomVmap), _call),
    }
)
