"""Describe structured primitives: the functions inside them, and how these are called.

A structured primitive holds functions: loops, branches, calls, custom derivatives, kernels.
Nothing in this file depends on how JAX names their parameters; `control_flow.py` reads the
parameters and makes these objects.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from halfstep._base import ClosedJaxpr

_T = TypeVar("_T")
_B = TypeVar("_B")


# All classes here are compared by identity: two traced functions are never equal for JAX, and
# comparing their parameters would compare arrays.
@dataclasses.dataclass(frozen=True, eq=False)
class Inner:
    """A function inside an operation, and where its inputs come from."""

    function: ClosedJaxpr
    label: str
    """The name of the function in reports: `scan x12`, `branch 1`, `jit`."""
    operands: tuple[int, ...] | None
    """The operand of the operation that each input takes; a carry takes it in the first iteration.
    `None` where JAX does not say."""
    carried: range = range(0)
    """Inputs that are results of the previous iteration: number `i` of these is result `i`."""
    sliced: range = range(0)
    """Inputs that are sliced: every iteration sees one slice."""
    times: int = 1
    """How often one run of the operation calls the function, as far as the program says."""
    is_loop: bool = False
    is_test: bool = False
    """Whether the function only decides whether a loop goes on."""


@dataclasses.dataclass(frozen=True, eq=False)
class Structure(abc.ABC):
    """A structured primitive as the installed JAX has traced it."""

    names: ClassVar[tuple[str, ...]] = ()
    """The names of the primitive, in any supported JAX."""
    is_opaque: ClassVar[bool] = False
    """Whether the primitive runs as written: nothing inside it is rewritten or recorded."""

    @abc.abstractmethod
    def inner(self) -> tuple[Inner, ...]:
        """Return the functions inside, in the order in which they are written."""


# Loops and branches.


@dataclasses.dataclass(frozen=True, eq=False)
class Scan(Structure):
    """`jax.lax.scan`, and `fori_loop` with a known number of iterations."""

    names: ClassVar = ("scan",)
    body: ClosedJaxpr
    consts: int
    """The number of operands that every iteration sees whole; they come first."""
    carries: int
    """The number of operands carried from one iteration to the next; the rest are sliced."""
    length: int
    reverse: bool
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the function that runs in each iteration."""
        return self.body.jaxpr.debug_info.func_name

    def inner(self) -> tuple[Inner, ...]:
        """Return the body."""
        count, first = len(self.body.jaxpr.invars), self.consts + self.carries
        return (
            Inner(
                self.body,
                f"scan x{self.length}",
                tuple(range(count)),
                range(self.consts, first),
                range(first, count),
                self.length,
                is_loop=True,
            ),
        )

    def split(self, values: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T], Sequence[_T]]:
        """Split the operands into constants, carries and sliced operands."""
        first, second = self.consts, self.consts + self.carries
        return values[:first], values[first:second], values[second:]

    def bind(self, body: Callable[..., Any], init: object, xs: object) -> Any:
        """Run another body in the same loop."""
        # This calls the public function and not the primitive: the other body's carries may have
        # other dtypes, and `scan` traces the body and checks them.
        return jax.lax.scan(
            body, init, xs, length=self.length, reverse=self.reverse, **self.options
        )


@dataclasses.dataclass(frozen=True, eq=False)
class While(Structure):
    """`jax.lax.while_loop`, and `fori_loop` without a known number of iterations."""

    names: ClassVar = ("while",)
    test: ClosedJaxpr
    body: ClosedJaxpr
    test_consts: int
    """The number of operands that only the test sees; they come first."""
    body_consts: int
    """The number of operands that only the body sees; the carries follow."""

    @property
    def name(self) -> str:
        """The name of the function that runs in each iteration."""
        return self.body.jaxpr.debug_info.func_name

    def inner(self) -> tuple[Inner, ...]:
        """Return the test and the body."""
        tests, first = self.test_consts, self.test_consts + self.body_consts
        carries = range(first, first + len(self.body.jaxpr.outvars))
        return (
            Inner(
                self.test,
                "while, test",
                (*range(tests), *carries),
                range(tests, tests + len(carries)),
                is_loop=True,
                is_test=True,
            ),
            Inner(
                self.body,
                "while",
                (*range(tests, first), *carries),
                range(self.body_consts, self.body_consts + len(carries)),
                is_loop=True,
            ),
        )

    def split(self, values: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T], Sequence[_T]]:
        """Split the operands into the test's constants, the body's constants, and carries."""
        first, second = self.test_consts, self.test_consts + self.body_consts
        return values[:first], values[first:second], values[second:]

    def bind(
        self, test: Callable[[_T], Any], body: Callable[[_T, _B], tuple[_T, _B]], init: _T, more: _B
    ) -> tuple[_T, _B]:
        """Run another test and another body in the same loop.

        `vmap` of a loop whose test depends on the data makes a test with a result for each element
        of the batch, which `while_loop` does not take. The loop then runs until no element goes on,
        and elements that have ended stay as they are.

        Args:
            test: Whether the loop goes on, given the carries.
            body: The next carries and the next `more`, given both.
            init: The first carries.
            more: Values to carry in addition, for the loop as a whole and not per element.
        """
        # JAX's own primitive takes such a test, and its public function does not.
        (tested,) = self.test.jaxpr.outvars
        is_mapped = bool(getattr(tested.aval, "shape", ()))

        def turn(state: tuple[_T, _B]) -> tuple[_T, _B]:
            carry, more = state
            made, more = body(carry, more)
            if is_mapped:
                goes_on = test(carry)
                made = jax.tree.map(functools.partial(_where_first, goes_on), made, carry)
            return made, more

        def goes_on(state: tuple[_T, _B]) -> Any:
            tested = test(state[0])
            return jnp.any(tested) if is_mapped else tested

        return jax.lax.while_loop(goes_on, turn, (init, more))


def _where_first(goes_on: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    # The dimensions of the batch come first in every carry.
    shape = (*goes_on.shape, *(1,) * (jnp.ndim(old) - goes_on.ndim))
    return jnp.where(goes_on.reshape(shape), new, old)


@dataclasses.dataclass(frozen=True, eq=False)
class Cond(Structure):
    """`jax.lax.cond`, `switch` and `platform_dependent`."""

    names: ClassVar = ("cond",)
    branches: tuple[ClosedJaxpr, ...]

    def inner(self) -> tuple[Inner, ...]:
        """Return the branches; the first operand says which one runs."""
        return tuple(
            Inner(branch, f"branch {number}", tuple(range(1, 1 + len(branch.jaxpr.invars))))
            for number, branch in enumerate(self.branches)
        )

    def bind(self, index: ArrayLike, branches: Sequence[Callable[..., Any]], *values: Any) -> Any:
        """Run other branches, chosen by the same index."""
        return jax.lax.switch(index, branches, *values)


# Calls.


@dataclasses.dataclass(frozen=True, eq=False)
class _SingleCall(Structure):
    """One function that is called once with all operands."""

    function: ClosedJaxpr
    name: str

    def inner(self) -> tuple[Inner, ...]:
        """Return the function that is called."""
        return (Inner(self.function, self.name, tuple(range(len(self.function.jaxpr.invars)))),)


@dataclasses.dataclass(frozen=True, eq=False)
class Jit(_SingleCall):
    """`jax.jit`, and the other plain calls that JAX makes."""

    names: ClassVar = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")
    in_shardings: tuple[Any, ...]
    """As `jax.jit` takes them; `None` for an operand whose sharding the call leaves open."""
    out_shardings: tuple[Any, ...]

    @property
    def is_only_a_call(self) -> bool:
        """Whether the call specifies no shardings."""
        return all(found is None for found in (*self.in_shardings, *self.out_shardings))

    def bind(self, func: Callable[..., Any], *values: Any, more: tuple[Any, ...] = ()) -> Any:
        """Call another function with the same shardings.

        Args:
            func: A function that returns what the call returns.
            *values: The operands.
            more: Shardings of additional results; `func` then returns a tuple of both.
        """
        # Shardings follow the structure of what is returned: a pair if there is more.
        outs: Any = self.out_shardings
        return jax.jit(
            func, in_shardings=self.in_shardings, out_shardings=(outs, *more) if more else outs
        )(*values)


@dataclasses.dataclass(frozen=True, eq=False)
class Remat(_SingleCall):
    """`jax.checkpoint`."""

    names: ClassVar = ("checkpoint", "remat", "remat2")
    prevent_cse: Any
    policy: Any

    bind_as_traced: Callable[[Any, Callable[..., Any], Sequence[Any]], list[Any]]
    """Runs another function in the same equation, given the primitive, the function and operands.

    This is for an equation that is differentiated already: `jax.checkpoint` would make a new
    equation, and XLA would notice that it computes the same as the forward pass.
    """

    def checkpoint(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap another function so that it is recomputed in the same way."""
        return jax.checkpoint(func, prevent_cse=self.prevent_cse, policy=self.policy)


@dataclasses.dataclass(frozen=True, eq=False)
class ShardMap(_SingleCall):
    """`jax.shard_map`."""

    names: ClassVar = ("shard_map",)
    mesh: Any
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    check_vma: bool
    manual_axes: frozenset[str]
    """The axes of the mesh that `shard_map` maps over."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The manual axes, in the order of the mesh."""
        # A set has no order, and every process has to name the axes in the same order.
        return tuple(name for name in self.mesh.axis_names if name in self.manual_axes)

    def bind(
        self,
        func: Callable[..., Any],
        *values: Any,
        in_specs: object = None,
        out_specs: object = None,
    ) -> Any:
        """Map another function over the same axes of the same mesh."""
        return jax.shard_map(
            func,
            mesh=self.mesh,
            in_specs=self.in_specs if in_specs is None else in_specs,
            out_specs=self.out_specs if out_specs is None else out_specs,
            check_vma=self.check_vma,
            axis_names=self.manual_axes,
        )(*values)


@dataclasses.dataclass(frozen=True, eq=False)
class CustomVmap(_SingleCall):
    """A function with `jax.custom_batching.custom_vmap`."""

    names: ClassVar = ("custom_vmap_call",)
    rule: Callable[[int, Sequence[bool], Sequence[Any]], tuple[Sequence[Any], Sequence[bool]]]
    """Maps the function over the first axis. Given the size of the axis, which operands have the
    axis, and the operands, it returns the results and which of them have the axis."""

    def bind(
        self, func: Callable[..., Any], rule: Callable[..., tuple[Any, Any]], *values: Any
    ) -> Any:
        """Call another function, with another rule for `vmap`."""
        made = jax.custom_batching.custom_vmap(func)
        made.def_vmap(lambda size, is_mapped, *values: rule(size, is_mapped, values))
        return made(*values)


# Calls with custom derivatives.


@dataclasses.dataclass(frozen=True, eq=False)
class CustomJvp(_SingleCall):
    """A function with `jax.custom_jvp`."""

    names: ClassVar = ("custom_jvp_call",)
    consts: int
    """The number of operands that the function closes over; its rule does not get them."""
    symbolic_zeros: bool
    rule: Callable[[Sequence[bool]], tuple[ClosedJaxpr, Sequence[bool]]]
    """Traces the rule, given which tangents are zero. The traced rule returns results and tangents;
    the flags say which tangents are zero and left out."""


@dataclasses.dataclass(frozen=True, eq=False)
class CustomVjp(_SingleCall):
    """A function with `jax.custom_vjp`."""

    names: ClassVar = ("custom_vjp_call",)
    consts: int
    """The number of operands that the function closes over; its rules do not get them."""
    symbolic_zeros: bool
    forward: Callable[[Sequence[bool]], ClosedJaxpr]
    """Traces the forward rule, given which operands are differentiated. The traced rule returns
    residuals and results."""
    forwarded: Callable[[], Sequence[int | None]]
    """For each residual, the operand that it is, or `None` if the forward rule computes it. Known
    once the forward rule has been traced."""
    backward: Callable[..., Sequence[Any]]
    """The backward rule on residuals and cotangents."""


# Operations that JAX has opaque rules for. Their inside is left alone.


@dataclasses.dataclass(frozen=True, eq=False)
class LinearSolve(Structure):
    """`jax.lax.custom_linear_solve`."""

    names: ClassVar = ("custom_linear_solve",)
    is_opaque: ClassVar = True
    functions: tuple[tuple[str, ClosedJaxpr], ...]

    def inner(self) -> tuple[Inner, ...]:
        """Return the matrix-vector products and solvers that are given."""
        return tuple(
            Inner(function, f"linear_solve, {name}", None) for name, function in self.functions
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Opaque(Structure):
    """A kernel, or a call with its own rules, which runs as written."""

    names: ClassVar = (
        *("pallas_call", "core_map", "run_state"),
        *("custom_partitioning", "composite", "linear_call"),
        *("call_hi_primitive", "xla_metadata_call"),
    )
    is_opaque: ClassVar = True
    label: str
    functions: tuple[ClosedJaxpr, ...]
    times: int = 1
    """How often the functions run: for a kernel, once for each block of its grid."""

    def inner(self) -> tuple[Inner, ...]:
        """Return the functions that run inside."""
        return tuple(
            Inner(function, self.label, None, times=self.times) for function in self.functions
        )
