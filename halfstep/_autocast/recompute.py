"""How an island is computed again: in a form that XLA neither undoes nor is hindered by.

`jax.checkpoint` alone bars what was stored and what comes back from behind from being merged with
anything. XLA:GPU needs both bars: without the second one it turns what comes back around in
float32. XLA:TPU only needs the first: the second one keeps it from fusing contractions with what
follows. Where forward and backward pass are apart anyway, in the body of a loop, and where nothing
lies between them, after the last contraction, neither is needed.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun

from halfstep._autocast.calls import RECOMPUTED
from halfstep._autocast.derivatives import zero_tangent
from halfstep._autocast.residuals import keep, restore
from halfstep._base import settled
from halfstep._policy import Factor
from halfstep._program import Scan, While


class Place(enum.Enum):
    """Where a plan runs, which says what XLA sees beside it."""

    WHOLE = "the whole function"
    LOOP = "in the body of a loop, whose backward pass is another loop"
    WITHIN = "in anything else: the backward pass follows, and something may lie between"

    def within(self, name: str) -> "Place":
        """The place of what is inside of an operation."""
        if name in (*Scan.names, *While.names):
            return Place.LOOP
        # Of what the user has computed again, both passes are in the body of one loop.
        is_loop = self is Place.LOOP and name not in RECOMPUTED
        return Place.LOOP if is_loop else Place.WITHIN


Function = Callable[..., tuple[Any, ...]]


def recomputed(func: Function, *, barred: bool, kept: Factor | None = None) -> Function:
    """A function whose inside is computed again for its derivatives.

    Args:
        func: A function of arrays, without effects.
        barred: Whether XLA must be kept from merging both computations into one.
        kept: How its arguments are kept, if not as they are.

    Returns:
        A function with the same results, whose derivatives store nothing but its arguments.
    """
    if not barred and kept is None:
        return jax.checkpoint(func, prevent_cse=False)
    return _again(func, barred=barred, kept=kept)


def _traced_once(func: Function) -> Function:
    """The same function, which layers that are written out share without tracing it again."""
    made: dict[Any, Any] = {}

    def call(*values: Any) -> tuple[Any, ...]:
        # Not by `jit`, which would compile it wherever the gradient is not itself compiled.
        types = tuple(map(jax.typeof, values))
        if types not in made:
            made[types] = jaxpr_as_fun(jax.make_jaxpr(func)(*values))
        return tuple(made[types](*values))

    return call


def _again(func: Function, *, barred: bool, kept: Factor | None) -> Function:
    # `jax.checkpoint` with its own barriers puts one around what comes back from behind, too, and
    # offers no way to leave that out for TPUs only. So the derivative is written here: the values
    # come out of the function as it is, and tangents out of a second copy of it, which begins
    # behind a barrier of our own. To differentiate that copy in reverse, JAX transposes it; the
    # checkpoint around it keeps its inside from being stored for that.
    func = _traced_once(func)

    @jax.custom_jvp
    def outer(*values: Any) -> tuple[Any, ...]:
        return func(*values)

    # Traced once, however often it is called: layers that are written out share it.
    @functools.cache
    def pushing(moving: tuple[int, ...], dtypes: tuple[Any, ...]) -> Callable[..., Any]:
        def push(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            # Of these everything is made again, so that nothing else has to be stored.
            held = jax.lax.optimization_barrier(list(primals)) if barred else list(primals)
            held = [restore(value, dtype) for value, dtype in zip(held, dtypes, strict=True)]

            def moved(*values: Any) -> tuple[Any, ...]:
                given = list(held)
                for i, value in zip(moving, values, strict=True):
                    given[i] = value
                return func(*given)

            _, made = jax.jvp(moved, [held[i] for i in moving], list(tangents))
            return _barred_but_on_tpu(made) if barred else made

        return jax.checkpoint(push, prevent_cse=False)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        moving = tuple(i for i, tangent in enumerate(tangents) if _moves(tangent))
        results = outer(*primals)
        if not moving:
            return results, tuple(map(zero_tangent, results))
        dtypes = tuple(primal.dtype for primal in primals)
        # Settled first: 8 bits of what XLA left unrounded would differ from 8 bits of the value
        # that every other reader sees.
        held = list(primals) if kept is None else [keep(settled(x), kept) for x in primals]
        return results, pushing(moving, dtypes)(held, [tangents[i] for i in moving])

    outer.defjvp(rule, symbolic_zeros=True)
    return outer


def _moves(tangent: Any) -> bool:
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0


def _barred_but_on_tpu(tangents: tuple[Any, ...]) -> tuple[Any, ...]:
    # Which platform it is gets known when the program is lowered, not now: preflight traces on a
    # CPU what it compiles for TPUs.
    moving = [i for i, tangent in enumerate(tangents) if _moves(tangent)]
    made = jax.lax.platform_dependent(
        [tangents[i] for i in moving],
        tpu=lambda values: values,
        default=lambda values: [jax.lax.optimization_barrier(value) for value in values],
    )
    out = list(tangents)
    for i, value in zip(moving, made, strict=True):
        out[i] = value
    return tuple(out)
