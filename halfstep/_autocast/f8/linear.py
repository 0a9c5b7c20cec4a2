"""Define linear functions that say themselves what their transpose is.

`jax.custom_derivatives.linear_call` does the same, but cannot be mapped over (`vmap`).
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from halfstep._base import type_of

_R = TypeVar("_R", contravariant=True)
Mapped = tuple[tuple[int | None, ...], ...]
"""The axis of each residual, for each `vmap` around a linear function, the first one first."""


@runtime_checkable
class Linear(Protocol[_R]):
    """A function that is linear in its arguments other than residuals. It is compared by value."""

    def push(self, residuals: _R, linears: Sequence[jax.Array]) -> jax.Array:
        """Return the result."""
        ...

    def pull(
        self, residuals: _R, cotangent: jax.Array, likes: Sequence[jax.ShapeDtypeStruct]
    ) -> Sequence[jax.Array]:
        """Return the cotangents of the linear arguments, whose shapes and dtypes are given."""
        ...


def linear(function: Linear[_R], residuals: _R, linears: Sequence[Any]) -> jax.Array:
    """Call a linear function.

    Args:
        function: The function to call.
        residuals: Arrays in which it is not linear.
        linears: Arrays in which it is linear.
    """
    flat, tree = jax.tree_util.tree_flatten(residuals)
    # `_once` refuses second derivatives. They would be silently wrong: a rounded value counts as a
    # constant here.
    flat = [_once(value) for value in flat]
    return _linear.bind(*flat, *linears, function=function, tree=tree, mapped=())


def product_with(
    contraction: Primitive,
    options: Mapping[str, Any],
    place: int,
    value: jax.Array,
    other: jax.Array,
    rest: Sequence[Any],
) -> jax.Array:
    """Run a contraction with a value in the place of one factor.

    Args:
        contraction: The primitive.
        options: The parameters of the primitive.
        place: Which factor.
        value: The value in that factor's place.
        other: The other factor.
        rest: The contraction's other operands.
    """
    factors = (value, other) if place == 0 else (other, value)
    return contraction.bind(*factors, *rest, **options)


def gradient_by(
    contraction: Primitive,
    options: Mapping[str, Any],
    place: int,
    cotangent: jax.Array,
    other: jax.Array,
    rest: Sequence[Any],
    like: jax.ShapeDtypeStruct,
) -> jax.Array:
    """Compute the gradient of one factor by the contraction's own transpose.

    Args:
        contraction: The primitive.
        options: The parameters of the primitive.
        place: Which factor.
        cotangent: The cotangent of the result.
        other: The other factor.
        rest: The contraction's other operands.
        like: The shape and dtype of the gradient.
    """
    aval: Any = jax.typeof(other)
    # The missing factor has the dtype of the gradient: JAX casts the gradient to it.
    divided = {"sharding": like.sharding} if explicit_sharding(like) is not None else {}
    missing = ad.UndefinedPrimal(aval.update(shape=like.shape, dtype=like.dtype, **divided))
    factors = (missing, other) if place == 0 else (other, missing)
    given = {**options, "preferred_element_type": like.dtype}
    made = ad.primitive_transposes[contraction](cotangent, *factors, *rest, **given)[place]
    # JAX returns no gradient where a convolution has no output at all.
    return ad.instantiate_zeros(made)


_linear = Primitive("halfstep_linear")


@jax.custom_jvp
def _once(value: jax.Array) -> jax.Array:
    """Return a value that may be kept for a derivative, but not be differentiated itself."""
    return value


def _refuse(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    if not isinstance(tangents[0], SymbolicZero):
        raise TypeError(
            "products in 8 bits have no second derivatives, and one with a saved factor of "
            f"{type_of(primals[0])} is differentiated twice: take them with a policy of 16 bits, "
            "such as policy='bf16', or keep these products out of it with a rule such as "
            "'op:dot_general=compute'."
        )
    return primals[0], tangents[0]


_once.defjvp(_refuse, symbolic_zeros=True)


def _apply(*values: Any, function: Linear[Any], tree: Any, mapped: Mapped) -> jax.Array:
    def push(flat: Sequence[Any], linears: Sequence[Any]) -> Any:
        return function.push(jax.tree_util.tree_unflatten(tree, flat), linears)

    count = tree.num_leaves
    for axes in mapped:
        push = jax.vmap(push, in_axes=(list(axes), 0))
    return push(list(values[:count]), list(values[count:]))


def explicit_sharding(aval: object) -> NamedSharding | None:
    """Return the sharding that is part of a value's type: over explicit axes of a mesh."""
    sharding = getattr(aval, "sharding", None)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return sharding
    return None


def _abstract(*avals: Any, **params: Any) -> Any:
    shapes = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=explicit_sharding(aval))
        for aval in avals
    ]
    if any(shape.sharding is not None for shape in shapes):
        return jax.make_jaxpr(lambda *values: _apply(*values, **params))(*shapes).out_avals[0]
    out = jax.eval_shape(lambda *values: _apply(*values, **params), *shapes)
    like = avals[params["tree"].num_leaves]
    varying = frozenset().union(*(getattr(aval, "vma", frozenset()) for aval in avals))
    made = like.update(shape=out.shape, dtype=out.dtype, weak_type=False)
    # Inside a shard_map, the type says over which axes of the mesh the result varies.
    return made.update(vma=varying) if varying else made


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    # The residuals have no tangents: `_once` makes sure of that.
    count = params["tree"].num_leaves
    given = [ad.instantiate_zeros(tangent) for tangent in tangents[count:]]
    return (
        _linear.bind(*primals, **params),
        _linear.bind(*primals[:count], *given, **params),
    )


def _transpose(
    cotangent: jax.Array | ad.Zero,
    *values: Any,
    function: Linear[Any],
    tree: Any,
    mapped: Mapped,
) -> list[Any]:
    count = tree.num_leaves
    if isinstance(cotangent, ad.Zero):
        return [None] * len(values)
    # Mapped dimensions come first, the last one outermost.
    likes = [
        jax.ShapeDtypeStruct(
            aval.shape[len(mapped) :], aval.dtype, sharding=_within(aval, len(mapped))
        )
        for aval in (
            value.aval if ad.is_undefined_primal(value) else value for value in values[count:]
        )
    ]

    def pull(flat: Sequence[Any], cotangent: jax.Array) -> list[jax.Array]:
        return list(function.pull(jax.tree_util.tree_unflatten(tree, flat), cotangent, likes))

    for axes in mapped:
        pull = jax.vmap(pull, in_axes=(list(axes), 0))
    made = pull(list(values[:count]), cotangent)
    return [None] * count + [
        gradient if ad.is_undefined_primal(value) else None
        for gradient, value in zip(made, values[count:], strict=True)
    ]


def _within(aval: object, mapped: int) -> NamedSharding | None:
    """Return the explicit sharding of a value without its leading dimensions."""
    sharding = explicit_sharding(aval)
    if sharding is None:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[mapped:]))


def _batch(values: Sequence[Any], axes: Sequence[Any], **params: Any) -> Any:
    count = params["tree"].num_leaves
    size = next(
        value.shape[axis] for value, axis in zip(values, axes, strict=True) if isinstance(axis, int)
    )
    residual_axes = tuple(axis if isinstance(axis, int) else None for axis in axes[:count])
    linears = [
        batching.bdim_at_front(value, axis if isinstance(axis, int) else None, size)
        for value, axis in zip(values[count:], axes[count:], strict=True)
    ]
    # `push` and `pull` cannot be mapped here: which of the two will run is not known yet. So the
    # axes are remembered, and `vmap` is applied where the function is called.
    mapped = (*params["mapped"], residual_axes)
    return _linear.bind(*values[:count], *linears, **{**params, "mapped": mapped}), 0


_linear.def_impl(_apply)
_linear.def_abstract_eval(_abstract)
ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_apply, multiple_results=False))
