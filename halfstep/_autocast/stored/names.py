"""Define stores: the form in which one value is kept from the forward to the backward pass.

`jax.checkpoint` recomputes a function for its derivative, from its inputs and from the values that
its policy saves. It saves a value as it is. A store saves the value in another form (8 bits with
scales) or in another place (the host), and leaves the forward pass unchanged:

    code = encode(value)                 # 8 bits, and a scale for each row
    code = checkpoint_name(code, ...)    # the only values that the policy saves
    back = decode(code)
    value = reread(value, back)          # forward: value. In what is recomputed: back.

`reread` is a primitive. `jax.checkpoint` splits the differentiated function into what is computed
now and what is recomputed later, and asks each primitive how it is split. `reread` hands on its
first operand now and its second one later. So the recomputation starts from `back`: neither `value`
nor what it was made of is needed again, and a contraction is never computed twice for a value that
is stored.

This one mechanism serves all decisions about a value. A value with a name but without a code is
kept in 16 bits. A value without a name is recomputed. A value is moved to the host if the policy
says so for its name. The policy reads the decision from the name, so it needs no table of values,
and JAX handles loops, `vmap` and `shard_map` inside and outside the function.

The code is made in a derivative rule, so a function that is not differentiated computes no code.
Second derivatives would silently lack the part through the code, so they raise.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

from halfstep._autocast.stored.float8 import Kept, keep, restore
from halfstep._autocast.stored.int4 import BLOCK, Packed, pack, unpack
from halfstep._base import cast, define_split, settled, type_of
from halfstep._policy import Factor

_PREFIX = "halfstep/"
ON_DEVICE = f"{_PREFIX}stored"
OFFLOADED = f"{_PREFIX}offloaded/"
_ENCODED = "encoded"
HALF = "16 bits"
"""The code of a float32 value that is stored in the compute dtype."""


@dataclasses.dataclass(frozen=True)
class Store:
    """How one value is kept."""

    code: str | None = None
    """`"e4m3"`, `"e5m2"`, `"int4"`, or `HALF`; `None` keeps the value as it is."""
    name: str = ON_DEVICE
    """The name that a `jax.checkpoint` policy sees. `explain` reads more from it: see `named`."""
    barred: bool = False
    """Whether XLA must be kept from encoding late, and keeping the value itself until then."""

    @property
    def is_plain(self) -> bool:
        """Whether the value is kept as it is, where it is."""
        return self.code is None and self.name.startswith(ON_DEVICE)

    def named(self, operation: str, by: str = "") -> "Store":
        """Return the same store, with the operation and the rule in its name."""
        label = StoreLabel(operation, self.code or "", by)
        return dataclasses.replace(self, name=f"{self.name}#{label}")


@dataclasses.dataclass(frozen=True)
class StoreLabel:
    """What the name of a stored value says about it."""

    operation: str
    code: str
    by: str
    is_encoded: bool = False
    """Whether the value was large enough for its code."""
    is_moved: bool = False
    """Whether the value is in the host's memory."""

    def __str__(self) -> str:
        return f"{self.operation}#{self.code}#{self.by}"

    @staticmethod
    def read(name: str) -> "StoreLabel | None":
        """Read a label from a name of `jax.checkpoint`; `None` if the name is not a store's."""
        place, *parts = name.split("#")
        if not place.startswith(_PREFIX) or len(parts) < 3:
            return None
        operation, code, by, *more = parts
        return StoreLabel(
            operation, code, by, is_encoded=bool(more), is_moved=place.startswith(OFFLOADED)
        )


def only_stores(primitive: Primitive, *_: Any, **params: Any) -> Any:
    """Save what has been stored, and nothing else: a policy of `jax.checkpoint`."""
    name = params.get("name", "") if primitive.name == "name" else ""
    if name.startswith(OFFLOADED):
        source, target = name.partition("#")[0].removeprefix(OFFLOADED).split("/")
        offload = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[name],
            offload_src=source,
            offload_dst=target,
        )
        return offload(primitive, *_, **params)
    return name.startswith(ON_DEVICE)


def stored(value: Any, store: Store, *, compute: np.dtype) -> Any:
    """Store a value, inside a `jax.checkpoint` with the policy `only_stores`.

    Args:
        value: Any array.
        store: How it is kept.
        compute: The dtype to which float32 is rounded before it is encoded.

    Returns:
        The same value; in the recomputation, the value that its code stands for.
    """
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        # `jax.checkpoint` rounds saved values by `reduce_precision`, which complex numbers lack.
        parts = [checkpoint_name(part, store.name) for part in (value.real, value.imag)]
        return jax.lax.complex(*parts)
    code = store.code
    if code is None or not _is_encoded(value, code, compute):
        return checkpoint_name(value, store.name)

    return _store.bind(value, store=store, compute=compute)


def stored_bytes(aval: ShapedArray, code: str | None, *, compute: np.dtype) -> int:
    """Return the bytes of a value in a code, with its scales; `None` keeps it as it is."""
    if code is None or not _is_encoded(aval, code, compute):
        return aval.size * aval.dtype.itemsize
    made = jax.eval_shape(lambda x: _encoded(x, code, compute), aval)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(made))


def _is_encoded(value: Any, code: str, compute: np.dtype) -> bool:
    # Integers have no code.
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    if code == HALF:
        return value.dtype == np.dtype(np.float32)
    made = jax.eval_shape(lambda x: _encoded(x, code, compute), value)
    return isinstance(made, Kept | Packed)


def _encoded(value: jax.Array, code: str, compute: np.dtype) -> jax.Array | Kept | Packed:
    # The value is settled first: 8 bits of a value that XLA left unrounded would differ from 8 bits
    # of the value that every other reader sees.
    is_wide = value.dtype == np.dtype(np.float32)
    value = cast(value, compute) if is_wide else settled(value)
    if code == HALF:
        return value
    made = keep(value, Factor(element="e5m2" if code == "e5m2" else "e4m3", per="row"))
    # Rows that do not consist of whole blocks are kept in 8 bits.
    row = value.shape[-1] if value.ndim else 0
    if code == "int4" and isinstance(made, Kept) and row % (2 * BLOCK) == 0:
        return pack(value)
    return made


def _decoded(made: jax.Array | Kept | Packed, dtype: np.dtype) -> jax.Array:
    return unpack(made, dtype) if isinstance(made, Packed) else restore(made, dtype).astype(dtype)


# `_once` marks a value that is encoded in the derivative, and is not differentiated itself. It is a
# primitive: up to JAX 0.10 a `custom_jvp` in the body of a loop is forgotten once the loop has been
# differentiated, and the second derivative would be silently wrong.
_once = Primitive("halfstep_once")


def _refuse(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    if not isinstance(tangents[0], ad.Zero):
        raise TypeError(
            f"a saved activation of {type_of(primals[0])} is encoded in 8 or 4 bits and has no "
            "second derivative: take second derivatives with a policy that keeps it in 16 bits "
            "(leave 'residuals=' out, or keep this value with a rule)."
        )
    return primals[0], tangents[0]


_once.def_impl(lambda value: value)
_once.def_abstract_eval(lambda value: value)
ad.primitive_jvps[_once] = _refuse
batching.defvectorized(_once)
mlir.register_lowering(_once, lambda context, value: [value])

# `_reread` is one value when it is computed, and another one when it is recomputed.
_reread = Primitive("halfstep_reread")


def _split(
    saveable: Any, unknown: Sequence[bool], held: Sequence[bool], equation: Any
) -> tuple[Any, Any, list[bool], list[bool], list[Any]]:
    """Split `_reread` for `jax.checkpoint`: see `jax.interpreters.partial_eval`.

    Returns:
        The equation that runs now and the one that is recomputed; whether the result is unknown now
        and whether it is recomputed; and the operands that have to be saved for recomputing.
    """
    del saveable
    value, back = equation.invars
    if any(unknown):
        # Inside a `jax.checkpoint` that is itself recomputed: all of it happens later.
        missing = [var for var, is_held in zip(equation.invars, held, strict=True) if not is_held]
        return None, equation, [True], [True], missing
    now, later = equation.replace(invars=[value, value]), equation.replace(invars=[back, back])
    return now, later, [False], [True], [] if held[1] else [back]


def _batch(values: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
    # The second operand is made of the first one, so both are mapped over, perhaps in different
    # dimensions.
    value, back = (
        batching.bdim_at_front(value, axis, _size(values, axes))
        for value, axis in zip(values, axes, strict=True)
    )
    return _reread.bind(value, back), 0


def _size(values: Sequence[Any], axes: Sequence[Any]) -> int:
    return next(
        value.shape[axis] for value, axis in zip(values, axes, strict=True) if axis is not None
    )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _reread.bind(*primals), tangents[0]


def _abstract(value: ShapedArray, back: ShapedArray) -> ShapedArray:
    del back
    return value


_reread.def_impl(lambda value, back: value)
_reread.def_abstract_eval(_abstract)
ad.primitive_jvps[_reread] = _jvp
batching.primitive_batchers[_reread] = _batch
partial_eval.partial_eval_jaxpr_custom_rules[_reread] = _split
mlir.register_lowering(_reread, lambda context, value, back: [value])


# `_store` makes the code of a value where the value is differentiated, and nowhere else. It is a
# primitive: with `jax_remat3` JAX does not look into a `custom_jvp` for what a policy saves.
_store = Primitive("halfstep_store")


def _made(
    value: jax.Array, store: Store, compute: np.dtype, see: Callable[[Any], Any] = lambda code: code
) -> tuple[jax.Array, Any]:
    """Return a value and its code, under the name that a policy saves."""
    # A value that is only rounded has derivatives of any order, as every cast has.
    source = value if store.code == HALF else _once.bind(value)
    made = _encoded(source, store.code or "", compute)
    if store.barred:
        value, made = jax.lax.optimization_barrier((value, made))
    return value, checkpoint_name(jax.tree.map(see, made), f"{store.name}#{_ENCODED}")


def _store_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Any], **how: Any
) -> tuple[jax.Array, Any]:
    (value,) = primals
    value, made = _made(value, **how)
    return _reread.bind(value, _decoded(made, value.dtype)), tangents[0]


def _store_batch(values: Sequence[Any], axes: Sequence[Any], **how: Any) -> tuple[Any, int]:
    # Codes have scales for rows, which are the last dimension.
    return _store.bind(jnp.moveaxis(values[0], axes[0], 0), **how), 0


def _store_split(
    split: Callable[..., Any], value: jax.Array, **how: Any
) -> tuple[Any, Any, Callable[..., Any]]:
    """Split `_store` for `jax.checkpoint` with `jax_remat3`: see `define_split`."""
    dtypes: list[np.dtype] = []

    def bits(part: jax.Array) -> jax.Array:
        # `jax.checkpoint` rounds what it saves to the exponents that IEEE's formats have, and
        # `float8_e4m3fn` has one more.
        dtypes.append(part.dtype)
        is_byte = part.dtype.itemsize == 1
        return jax.lax.bitcast_convert_type(part, np.uint8) if is_byte else part

    (value, _), again = split(lambda value: _made(value, **how, see=bits), value)

    def later(again: Callable[..., Any], value: jax.Array) -> jax.Array:
        _, kept = again(jax.lax.stop_gradient(value))
        kept, structure = jax.tree.flatten(kept)
        parts = map(jax.lax.bitcast_convert_type, kept, dtypes)
        return _restored(value, _decoded(jax.tree.unflatten(structure, parts), value.dtype))

    return value, again, later


@jax.custom_jvp
def _restored(value: jax.Array, back: jax.Array) -> jax.Array:
    """Return the value that a code stands for, whose derivative is that of the encoded value."""
    del value
    return back


_restored.defjvp(lambda primals, tangents: (primals[1], tangents[0]))
_store.def_impl(lambda value, **_: value)
_store.def_abstract_eval(lambda value, **_: value)
ad.primitive_jvps[_store] = _store_jvp
batching.primitive_batchers[_store] = _store_batch
mlir.register_lowering(_store, lambda context, value, **_: [value])
define_split(_store, _store_split)
