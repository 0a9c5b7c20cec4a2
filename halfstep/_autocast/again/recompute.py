"""Make regions again in a form that XLA does not undo, and that does not hinder XLA.

`jax.checkpoint` puts a barrier on both the saved inputs and the incoming cotangents, so that XLA
merges neither with anything. XLA:GPU needs something in both places: without a barrier on the
cotangents it transposes them in float32, and the step of a small ViT on an H100 moves 13.1 GiB
instead of 12.3. On the saved inputs, a barrier costs XLA:GPU more than it has to: see `_apart`.
XLA:TPU only needs the barrier on the saved inputs: the other one keeps it from fusing contractions
with what follows (14.5 GiB instead of 14.0 on a v5e). Neither is needed in the body of a loop,
where the two passes are apart anyway, or after the last contraction, where nothing lies between
the passes.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from halfstep._autocast.again.replay import pushed_as_one
from halfstep._autocast.custom_rules import zero_tangent
from halfstep._autocast.stored.names import only_stores

Function = Callable[..., tuple[Any, ...]]


def recomputed(
    func: Function,
    *,
    barred: bool,
    only_gpu: bool = False,
    merges: bool = False,
    factors: Collection[int] = (),
    has_names: bool = False,
) -> Function:
    """Return a function whose inside is recomputed for its derivatives.

    Args:
        func: A function of arrays, without effects.
        barred: Whether XLA must be kept from merging both computations into one.
        only_gpu: Whether only XLA:GPU must be kept from it; others then merge both.
        merges: Whether XLA may merge them all the same, and only cotangents have their barrier.
        factors: Positions of arguments that products inside read: see `_by_bits`.
        has_names: Whether values inside are stored, under the names of stores.

    Returns:
        A function with the same results, whose derivatives store its arguments, and values inside
        that are named.
    """
    if has_names:
        return jax.checkpoint(func, prevent_cse=barred, policy=only_stores)
    if not barred:
        return jax.checkpoint(func, prevent_cse=False)
    return _again(func, only_gpu=only_gpu, merges=merges, factors=factors)


def _traced_once(func: Function) -> Function:
    """Return the same function, which unrolled layers share without tracing it again."""
    made: dict[Any, Any] = {}

    def call(*values: Any) -> tuple[Any, ...]:
        # Not `jit`: it would compile the function wherever the gradient is not itself compiled.
        types = tuple(map(jax.typeof, values))
        if types not in made:
            made[types] = jaxpr_as_fun(jax.make_jaxpr(func)(*values))
        return tuple(made[types](*values))

    return call


def together(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function, whose cotangents leave it together, when all have been computed."""

    @jax.custom_jvp
    def outer(*values: Any) -> Any:
        return func(*values)

    def rule(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
        moving = [place for place, tangent in enumerate(tangents) if _moves(tangent)]
        if not moving:
            result = outer(*primals)
            return result, zero_tangent(result)

        def moved(*values: Any) -> Any:
            given = list(primals)
            for place, value in zip(moving, values, strict=True):
                given[place] = value
            return func(*given)

        joined = _join.bind(*(tangents[place] for place in moving))
        return jax.jvp(moved, [primals[place] for place in moving], joined)

    outer.defjvp(rule, symbolic_zeros=True)
    return outer


def _again(func: Function, *, only_gpu: bool, merges: bool, factors: Collection[int]) -> Function:
    # `jax.checkpoint` also puts a barrier on the incoming cotangents, and offers no way to leave it
    # out for TPUs only. So the derivative is written here. The values come out of the function as
    # it is, and the tangents out of a second copy of it, which begins behind a barrier of our own.
    # That copy is one operation, so that nothing inside it is stored for its transpose.
    func = _traced_once(func)

    @jax.custom_jvp
    def outer(*values: Any) -> tuple[Any, ...]:
        return func(*values)

    # Traced once, however often it is called: unrolled layers share it.
    @functools.cache
    def pushing(moving: tuple[int, ...]) -> Callable[..., Any]:
        def push(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
            # Everything is recomputed from these values, so that nothing else has to be stored.
            held = list(primals)
            if not merges:
                held = _held_apart(primals, only_gpu=only_gpu, factors=factors)

            def moved(*values: Any) -> tuple[Any, ...]:
                given = list(held)
                for i, value in zip(moving, values, strict=True):
                    given[i] = value
                return func(*given)

            _, made = jax.jvp(moved, [held[i] for i in moving], list(tangents))
            if only_gpu:
                return made
            return tuple(_barred_but_on_tpu(out) if _moves(out) else out for out in made)

        return pushed_as_one(push)

    def rule(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> Any:
        moving = tuple(i for i, tangent in enumerate(tangents) if _moves(tangent))
        results = outer(*primals)
        if not moving:
            return results, tuple(map(zero_tangent, results))
        return results, pushing(moving)(list(primals), [tangents[i] for i in moving])

    outer.defjvp(rule, symbolic_zeros=True)
    return outer


def _moves(tangent: jax.Array | np.ndarray | SymbolicZero) -> bool:
    return not isinstance(tangent, SymbolicZero) and tangent.dtype != jax.dtypes.float0


def _barred_but_on_tpu(tangent: jax.Array) -> jax.Array:
    # The platform is known only when the program is lowered: preflight traces on a CPU what it
    # compiles for TPUs. Each tangent has a barrier of its own, which a zero does not depend on.
    return jax.lax.platform_dependent(
        tangent, tpu=lambda value: value, default=jax.lax.optimization_barrier
    )


# The saved inputs of a region, as the recomputation reads them.

_apart = Primitive("halfstep_apart")
_UNSIGNED = MappingProxyType({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64})


def _held_apart(values: Sequence[Any], *, only_gpu: bool, factors: Collection[int]) -> list[Any]:
    """Return the same values, so that XLA merges no copies of what is made of them."""
    made = {
        place: _apart.bind(value, only_gpu=only_gpu)
        for place, value in enumerate(values)
        if _is_real(value.dtype) and place not in factors
    }
    others = [value for place, value in enumerate(values) if place not in made]
    barred = iter(jax.lax.optimization_barrier(others) if others and not only_gpu else others)
    return [made[place] if place in made else next(barred) for place in range(len(values))]


def _is_real(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits == 8 * dtype.itemsize


def _by_barrier(value: jax.Array, *, only_gpu: bool) -> jax.Array:
    return value if only_gpu else jax.lax.optimization_barrier(value)


def _by_bits(value: jax.Array, **_: bool) -> jax.Array:
    """Combine the bits with a zero that XLA does not know.

    The recomputation then differs from the first computation, so XLA:GPU does not merge the two. A
    barrier on the value itself would do more: XLA:GPU fuses nothing across it, and it never
    recomputes a value that a barrier reads when memory runs out. The desktop ViT at batch 256 moves
    8.6 GiB in this way on an H100, and 8.9 GiB with the barrier. These are bits because XLA:GPU
    would keep a float32 copy of a bfloat16 number that arithmetic reads, on cards without such
    arithmetic. What a product reads gets a barrier all the same: XLA:GPU would write the combined
    bits to memory for it.
    """
    unsigned = _UNSIGNED[value.dtype.itemsize]
    zero = jax.lax.optimization_barrier(jnp.zeros((), unsigned))
    bits = jax.lax.bitcast_convert_type(value, unsigned) ^ zero
    return jax.lax.bitcast_convert_type(bits, value.dtype)


def _apart_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array], *, only_gpu: bool
) -> tuple[jax.Array, jax.Array]:
    return _apart.bind(*primals, only_gpu=only_gpu), tangents[0]


_apart.def_impl(lambda value, **_: value)
_apart.def_abstract_eval(lambda value, **_: value)
ad.primitive_jvps[_apart] = _apart_jvp
batching.defvectorized(_apart)
# Without the barrier, XLA:TPU keeps more: 1,082 MiB instead of 881 for the desktop ViT on a v5e.
# Other compilers were not measured.
mlir.register_lowering(_apart, mlir.lower_fun(_by_barrier, multiple_results=False))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(
        _apart, mlir.lower_fun(_by_bits, multiple_results=False), platform=_platform
    )


# `x - max(x)` inside an island.
#
# It is one primitive and not `platform_dependent`, which would trace, differentiate and lower two
# branches for every softmax.

Array = jax.Array | np.ndarray
_difference = Primitive("halfstep_difference")


def difference(left: Array, right: Array, *, compute: np.dtype) -> jax.Array:
    """Subtract in float32, or on TPU in the compute dtype with a float32 result.

    XLA:TPU would write the float32 difference to memory, once for the exponential and once for its
    derivative. The operands are values of the compute dtype, so the only loss is one rounding.
    """
    return _difference.bind(left, right, compute=compute)


def _exact(left: Array, right: Array, *, compute: np.dtype) -> jax.Array:
    del compute
    return jax.lax.sub(left, right)


def _low(left: Array, right: Array, *, compute: np.dtype) -> jax.Array:
    made = [jax.lax.convert_element_type(value, compute) for value in (left, right)]
    return jax.lax.convert_element_type(jax.lax.sub(*made), left.dtype)


def _abstract(left: ShapedArray, right: ShapedArray, *, compute: np.dtype) -> ShapedArray:
    del compute
    return jax.lax.sub_p.abstract_eval(left, right)[0]


def _spread(tangent: jax.Array, left: Array, right: Array) -> jax.Array:
    # NumPy does not know the symbolic dimensions of `jax.export`.
    shape = jnp.broadcast_shapes(left.shape, right.shape)
    return tangent if tangent.shape == shape else jnp.broadcast_to(tangent, shape)


_difference.def_impl(_exact)
_difference.def_abstract_eval(_abstract)
ad.defjvp(
    _difference,
    lambda tangent, *primals, **_: _spread(tangent, *primals),
    lambda tangent, *primals, **_: jax.lax.neg(_spread(tangent, *primals)),
)
batching.defbroadcasting(_difference)
mlir.register_lowering(_difference, mlir.lower_fun(_exact, multiple_results=False))
mlir.register_lowering(_difference, mlir.lower_fun(_low, multiple_results=False), platform="tpu")


# Tangents whose cotangents leave together.

_join = Primitive("halfstep_join")
_join.multiple_results = True


def _join_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _join.bind(*primals), _join.bind(*map(ad.instantiate_zeros, tangents))


def _join_transpose(cotangents: Sequence[Any], *_: Any) -> list[Any]:
    places = [place for place, one in enumerate(cotangents) if not isinstance(one, ad.Zero)]
    made = list(cotangents)
    barred = jax.lax.optimization_barrier([cotangents[place] for place in places])
    for place, one in zip(places, barred, strict=True):
        made[place] = one
    return made


_join.def_impl(lambda *values: list(values))
_join.def_abstract_eval(lambda *avals: list(avals))
ad.primitive_jvps[_join] = _join_jvp
ad.primitive_transposes[_join] = _join_transpose
batching.primitive_batchers[_join] = lambda values, axes: (_join.bind(*values), list(axes))
mlir.register_lowering(_join, lambda context, *values: list(values))
