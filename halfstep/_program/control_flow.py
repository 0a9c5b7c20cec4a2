"""Read how the installed JAX describes its structured primitives, in a single table.

Each primitive has its own parameters, and JAX renames them between releases: `scan` counted its
operands in `num_consts` and `num_carry` up to JAX 0.10, and describes them by the flat trees
`ft_in` and `ft_out` since JAX 0.11. `autocast`, `explain`, `debug` and `preflight` use this table
and never read the parameters themselves, so that a rename needs one edit here.
`tests/program/test_control_flow.py` checks every row of the table against the installed JAX.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jax.extend.core.primitives import remat_p

from halfstep._base import NAME_PRIMITIVE, ClosedJaxpr, closed, jaxprs_in, known_to_work
from halfstep._program.structures import (
    Cond,
    CustomJvp,
    CustomVjp,
    CustomVmap,
    Jit,
    LinearSolve,
    Opaque,
    Remat,
    Scan,
    ShardMap,
    Structure,
    While,
)

_T = TypeVar("_T")


class JaxVersionError(NotImplementedError):
    """The installed JAX describes a primitive in a way that this halfstep does not know."""


class _Parameters:
    """The parameters of one operation; the error for a missing one says which JAX versions work."""

    def __init__(self, primitive: str, params: Mapping[str, Any]) -> None:
        self.primitive, self.params = primitive, params

    def __contains__(self, name: str) -> bool:
        return name in self.params

    def __getitem__(self, name: str) -> Any:
        if name not in self.params:
            raise self.error(name, "is missing")
        return self.params[name]

    def read(self, name: str, how: Callable[[Any], _T]) -> _T:
        """Read a parameter with the given function; raise if the parameter has an unknown form."""
        value = self[name]
        try:
            return how(value)
        except (AttributeError, TypeError, ValueError) as cause:
            raise self.error(name, f"is a {type(value).__name__} of another form") from cause

    def error(self, name: str, problem: str) -> JaxVersionError:
        return JaxVersionError(
            f"JAX {jax.__version__} describes `{self.primitive}` in a way that this version of "
            f"halfstep does not know: the parameter `{name}` {problem} (it has "
            f"{', '.join(f'`{found}`' for found in sorted(self.params)) or 'none'}). Known to "
            f"work: {known_to_work()}. Install one of those, or a newer halfstep."
        )


def _scan(params: _Parameters) -> Scan:
    if "num_consts" in params:
        consts, carries = params["num_consts"], params["num_carry"]
    else:
        # Since JAX 0.11, one flat tree holds all operands, in three parts.
        consts, carries, _ = params.read("ft_in", lambda found: tuple(map(len, found.unpack())))
    # These are options of `jax.lax.scan`, which rebuilds the loop: they keep the loop the same.
    options = {"unroll": params["unroll"]}
    if "_split_transpose" in params:
        options["_split_transpose"] = params["_split_transpose"]
    body = params.read("jaxpr", closed)
    return Scan(body, consts, carries, params["length"], params["reverse"], options)


def _while(params: _Parameters) -> While:
    return While(
        params.read("cond_jaxpr", closed),
        params.read("body_jaxpr", closed),
        params["cond_nconsts"],
        params["body_nconsts"],
    )


def _cond(params: _Parameters) -> Cond:
    return Cond(params.read("branches", lambda found: tuple(map(closed, found))))


def _jit(params: _Parameters) -> Jit:
    name = "jaxpr" if "jaxpr" in params else "call_jaxpr"
    in_shardings, out_shardings = (
        params.read(name, lambda found: tuple(map(_sharding, found))) if name in params else ()
        for name in ("in_shardings", "out_shardings")
    )
    return Jit(params.read(name, closed), params.primitive, in_shardings, out_shardings)


def _sharding(found: object) -> object:
    # JAX's marker for an unspecified sharding is private, and `jax.jit` takes `None` for it.
    return None if type(found).__name__ == "UnspecifiedValue" else found


def _remat(params: _Parameters) -> Remat:
    function, held = params.read("jaxpr", closed), params["jaxpr"]

    def bind_as_traced(
        primitive: core.Primitive, func: Callable[..., Any], values: Sequence[Any]
    ) -> list[Any]:
        made = jax.make_jaxpr(func)(*values)
        # Up to JAX 0.10 the equation holds an open function, and later a function with constants.
        kept = made if isinstance(held, type(made)) else made.jaxpr
        return bind_again(primitive, {**params.params, "jaxpr": kept}, values)

    return Remat(
        function, params.primitive, params["prevent_cse"], params["policy"], bind_as_traced
    )


def _shard_map(params: _Parameters) -> ShardMap:
    return ShardMap(
        params.read("jaxpr", closed),
        params.primitive,
        params["mesh"],
        params.read("in_specs", tuple),
        params.read("out_specs", tuple),
        params["check_vma"],
        params.read("newly_manual_axes", frozenset),
    )


def _custom_vmap(params: _Parameters) -> CustomVmap:
    rule, tree = params["rule"], params["in_tree"]

    def mapped(
        size: int, is_mapped: Sequence[bool], values: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[bool]]:
        made = rule(size, list(tree.unflatten(is_mapped)), *tree.unflatten(values))
        results, found = map(jtu.tree_leaves, made)
        return results, found

    return CustomVmap(params.read("call", closed), params.primitive, mapped)


def _custom_jvp(params: _Parameters) -> CustomJvp:
    function, consts = params.read("call_jaxpr", closed), params["num_consts"]
    trace = params["jvp_jaxpr_fun"]

    def rule(zeros: Sequence[bool]) -> tuple[ClosedJaxpr, Sequence[bool]]:
        jaxpr, captured, out_zeros = trace.call_wrapped(*zeros[consts:])
        return ClosedJaxpr(jaxpr, captured), out_zeros

    return CustomJvp(function, params.primitive, consts, params["symbolic_zeros"], rule)


def _custom_vjp(params: _Parameters) -> CustomVjp:
    function, consts = params.read("call_jaxpr", closed), params["num_consts"]
    trace, trees, backward = params["fwd_jaxpr_thunk"], params["out_trees"], params["bwd"]

    def forward(differentiated: Sequence[bool]) -> ClosedJaxpr:
        return ClosedJaxpr(*trace.call_wrapped(*differentiated[consts:]))

    def forwarded() -> Sequence[int | None]:
        _, _, found = trees()
        return found

    def cotangents(*given: Any) -> Sequence[Any]:
        made = backward.call_wrapped(*given)
        if not isinstance(made, tuple):
            return made
        # Since JAX 0.11 a pair: the cotangents, and the logs of a rule of `defvjp_with_logs`.
        found, logs = made
        if logs is not None:
            raise NotImplementedError(
                f"a backward rule of `defvjp_with_logs` logs {sorted(logs)}, and `autocast` cannot "
                "hand logs on. Use `defvjp`, or call the function outside `autocast`."
            )
        return found

    return CustomVjp(
        function,
        params.primitive,
        consts,
        params["symbolic_zeros"],
        forward,
        forwarded,
        cotangents,
    )


def _linear_solve(params: _Parameters) -> LinearSolve:
    functions = params.read("jaxprs", lambda found: found._asdict().items())
    return LinearSolve(
        tuple((name, closed(function)) for name, function in functions if function is not None)
    )


def _opaque(params: _Parameters) -> Opaque:
    if params.primitive == "pallas_call":
        # A dimension that is only known at run time counts as one block.
        grid = params.read("grid_mapping", lambda found: tuple(found.grid))
        blocks = math.prod(size for size in grid if isinstance(size, int))
        # The functions in `grid_mapping` are left out: they only say where blocks lie.
        return Opaque(params.primitive, (params.read("jaxpr", closed),), blocks)
    if params.primitive != "call_hi_primitive":
        return Opaque(params.primitive, tuple(jaxprs_in(params.params)))
    # All operations that are written as classes (`jax.experimental.hijax`) share one primitive.
    operation = params["_prim"]
    avals = params.read("_prim", lambda found: found.in_avals)
    # Those that hold functions expand to what runs them, such as a loop with a `Ref` for a carry.
    held = tuple(jaxprs_in(params.params))
    functions = held or (jax.make_jaxpr(operation.expand)(*avals),)
    return Opaque(type(operation).__name__, functions)


_ROWS: tuple[tuple[type[Structure], Callable[[_Parameters], Structure]], ...] = (
    (Scan, _scan),
    (While, _while),
    (Cond, _cond),
    (Jit, _jit),
    (Remat, _remat),
    (ShardMap, _shard_map),
    (CustomVmap, _custom_vmap),
    (CustomJvp, _custom_jvp),
    (CustomVjp, _custom_vjp),
    (LinearSolve, _linear_solve),
    (Opaque, _opaque),
)
TABLE = MappingProxyType({name: read for kind, read in _ROWS for name in kind.names})
"""The reader of every structured primitive, by name."""


# With `jax_remat3` JAX makes objects of these classes, with the parameters of these primitives.
_FORMER = MappingProxyType(
    {
        "RematTraced": (remat_p, {"prevent_cse": True, "differentiated": False}),
        "CheckpointName": (NAME_PRIMITIVE, {}),
        "CheckpointNameFwd": (NAME_PRIMITIVE, {}),
    }
)


def spelled(equation: core.JaxprEqn) -> tuple[core.Primitive, Mapping[str, Any]]:
    """Return the primitive and the parameters of an operation, as JAX has them without flags."""
    primitive, params = equation.primitive, equation.params
    return _former(primitive.name, params) or (primitive, params)


def _former(
    name: str, params: Mapping[str, Any]
) -> tuple[core.Primitive, Mapping[str, Any]] | None:
    operation = params.get("_prim") if name == "call_hi_primitive" else None
    if type(operation).__name__ not in _FORMER:
        return None
    primitive, defaults = _FORMER[type(operation).__name__]
    own = _Parameters(name, params).read("_prim", operator.attrgetter("params"))
    return primitive, {**defaults, **own}


def structure_of(name: str, params: Mapping[str, Any]) -> Structure | None:
    """Return the structure of a primitive, read from its parameters; `None` if it has none.

    Args:
        name: The name of the primitive.
        params: The parameters of one equation.

    Raises:
        JaxVersionError: If the installed JAX describes the primitive in an unknown way.
    """
    if (found := _former(name, params)) is not None:
        name, params = found[0].name, found[1]
    read = TABLE.get(name)
    return None if read is None else read(_Parameters(name, params))


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yield all equations of a traced function and of every function inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in functions_in(equation.primitive.name, equation.params):
            yield from equations(inner.jaxpr)


def functions_in(name: str, params: Mapping[str, Any]) -> Iterator[ClosedJaxpr]:
    """Yield all functions that an operation holds, even if the operation is not in the table."""
    found = structure_of(name, params)
    if found is None:
        yield from jaxprs_in(params)
    else:
        yield from (inner.function for inner in found.inner())


def bind_again(
    primitive: core.Primitive, params: Mapping[str, Any], operands: Sequence[Any]
) -> list[Any]:
    """Run a primitive on operands, with the parameters of an equation."""
    if primitive is NAME_PRIMITIVE:
        # By the public function, which makes another operation with `jax_remat3`.
        return [checkpoint_name(operands[0], params["name"])]
    # An equation holds traced functions, and `bind` of some primitives needs callables. The
    # primitive itself knows how to convert them back.
    results = primitive.bind(*operands, **primitive.get_bind_params(dict(params)))
    return list(results) if primitive.multiple_results else [results]


def as_linear_as_said(params: Mapping[str, Any], operands: int) -> dict[str, Any]:
    """Return the parameters of a `custom_linear_solve` whose solvers pass on non-finite values.

    The solution for a right-hand side with an infinity or a NaN is not finite. Conjugate gradients
    and similar solvers return zeros instead: they start from zeros and iterate while the residual
    is larger than a tolerance, and no comparison with an infinite tolerance or with NaN holds. An
    overflow of float16 before the solve would then go unnoticed, and the step would be taken with a
    wrong gradient instead of being skipped.

    Args:
        params: The parameters of an equation.
        operands: The number of operands of the equation.
    """
    found = _Parameters("custom_linear_solve", params)
    sides = operands - found.read("const_lengths", sum)

    def kept(solver: ClosedJaxpr) -> ClosedJaxpr:
        def solve(*args: Any) -> list[Any]:
            results = core.jaxpr_as_fun(solver)(*args)
            # Each is zero or NaN, by a linear function, because JAX transposes it. Where a batch is
            # solved as one system, all rows become NaN.
            zeros = [jnp.sum(0 * side) for side in args[-sides:]]
            wrong = functools.reduce(operator.add, zeros)
            solved = [result + wrong.astype(result.dtype) for result in results[:sides]]
            return [*solved, *results[sides:]]

        return jax.make_jaxpr(solve)(*solver.in_avals)

    jaxprs = found["jaxprs"]
    solvers = {"solve": jaxprs.solve, "transpose_solve": jaxprs.transpose_solve}
    changed = {name: kept(solver) for name, solver in solvers.items() if solver is not None}
    return {**params, "jaxprs": jaxprs._replace(**changed)}
